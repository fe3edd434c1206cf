// What is computed from frames, without a page around it.

export const KEPT_S = 900;

export function instancesOf(frame) {
  return Object.entries(frame.clusters).flatMap(([cluster, facts]) =>
    Object.entries(facts.instances).map(([name, instance]) => ({ name, cluster, kind: facts.kind, ...instance })));
}

// How busy an instance is, 0 to 1: the decode slots in use, or whether a prefill is at work and how many wait.
export function loadOf(instance) {
  if (!instance.healthy) return null;
  const slots = instance.decode_slots ? Math.min((instance.decoding || 0) / instance.decode_slots, 1) : 0;
  const queue = instance.queue ? Math.min(0.4 + 0.15 * instance.queue, 1) : 0;
  return Math.max(instance.role.includes('decode') ? slots : 0, instance.role.includes('prefill') ? queue : 0);
}

export const heat = (share) => share == null ? 'out' : String(Math.min(Math.ceil(share * 5), 5));

// Runs of equal values over time, so that a quarter of an hour is a few rectangles.
export function runs(frames, valueOf) {
  const found = [];
  frames.forEach((frame, index) => {
    const value = valueOf(frame);
    const until = frames[index + 1]?.at_s ?? frame.at_s + 1;
    const last = found.at(-1);
    if (last && last.value === value) last.until = until;
    else found.push({ value, from: frame.at_s, until });
  });
  return found;
}

const flat = (routes) => Object.entries(routes || {}).flatMap(([route, reasons]) =>
  Object.entries(reasons).map(([reason, total]) => [`${route}: ${reason}`, total]));

// Decisions per bucket of time, by reason. Totals grow only; where one falls, the gateway began anew.
export function decisions(frames, bucketS) {
  const buckets = new Map();
  frames.forEach((frame, index) => {
    if (index === 0) return;
    const before = new Map(flat(frames[index - 1].routes));
    const start = Math.floor(frame.at_s / bucketS) * bucketS;
    const bucket = buckets.get(start) || new Map();
    buckets.set(start, bucket);
    for (const [reason, total] of flat(frame.routes)) {
      const was = before.get(reason) || 0;
      const more = total >= was ? total - was : total;
      if (more) bucket.set(reason, (bucket.get(reason) || 0) + more);
    }
  });
  return [...buckets].sort(([a], [b]) => a - b).map(([start, reasons]) => ({ start, reasons }));
}

// The frame of a moment: the last one that is not after it.
export function frameAt(frames, atS) {
  let found = frames[0];
  for (const frame of frames) { if (frame.at_s > atS + 0.001) break; found = frame; }
  return found;
}

export const LINK_STATES = {
  clear: 'good', busy: 'good', congested: 'bad', slow: 'warn', 'slow-sender': 'warn', 'slow-receiver': 'warn',
  unheard: 'warn', down: 'bad',
};

export const linkState = (link) => link.up ? LINK_STATES[link.condition] || 'warn' : 'bad';

const MINUTE_S = 60;

// How much of each link, of each cluster's prefill and decode, and of each KVCache was in use, by one frame.
function pressures(frame) {
  const found = new Map();
  const note = (key, short, what, share) => found.set(key, { short, what, share });
  for (const [name, link] of Object.entries(frame.links)) {
    if (link.up && link.utilisation != null) note(`link ${name}`, 'A link', `the link ${name}`, Math.min(link.utilisation, 1));
  }
  for (const [cluster, facts] of Object.entries(frame.clusters)) {
    const members = Object.entries(facts.instances).filter(([, each]) => each.healthy);
    const prefills = members.filter(([, each]) => each.role.includes('prefill'));
    if (prefills.length) note(`prefill ${cluster}`, 'Prefill', `prefill in ${cluster}`, prefills.filter(([, each]) => each.queue > 0).length / prefills.length);
    const decodes = members.filter(([, each]) => each.role.includes('decode') && each.decode_slots);
    const slots = decodes.reduce((sum, [, each]) => sum + each.decode_slots, 0);
    if (slots) note(`decode ${cluster}`, 'Decode', `decode in ${cluster}`, Math.min(decodes.reduce((sum, [, each]) => sum + (each.decoding || 0), 0) / slots, 1));
    for (const [name, each] of members) if (each.kv_usage != null) note(`kv ${name}`, 'KVCache', `the KVCache of ${name}`, each.kv_usage);
  }
  return found;
}

// What was in use most over the minute before a moment; null before anything is known.
export function bottleneck(frames, atS) {
  const sums = new Map();
  const seen = frames.filter((frame) => frame.at_s <= atS + 0.001 && frame.at_s > atS - MINUTE_S);
  for (const frame of seen) {
    for (const [key, { short, what, share }] of pressures(frame)) sums.set(key, { short, what, share: (sums.get(key)?.share || 0) + share / seen.length });
  }
  return [...sums.values()].sort((a, b) => b.share - a.share)[0] || null;
}
