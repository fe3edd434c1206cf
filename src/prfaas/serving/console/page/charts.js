// Decisions over time by reason, and uncached lengths with the thresholds.

import { html } from '/console/vendor/htm-preact.js';
import * as format from '/console/format.js';
import { decisions } from '/console/model.js';

const HEIGHT = 170, LEFT = 38, BOTTOM = 22, TOP = 10;
const BUCKET_S = 15;

// Each reason keeps its colour, in the order of the alphabet, offloads first.
export function colours(reasons) {
  const sorted = [...reasons].sort((a, b) => b.startsWith('offload') - a.startsWith('offload') || a.localeCompare(b));
  return new Map(sorted.map((reason, index) => [reason, index % 10]));
}

function Axis({ width, most, unit }) {
  const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / most);
  return html`<g class="axis">${[0, most / 2, most].map((value) => html`<g key=${value}>
    <line x1=${LEFT} x2=${width} y1=${y(value)} y2=${y(value)} />
    <text x=${LEFT - 5} y=${y(value) + 4} text-anchor="end">${value >= 10 || Number.isInteger(value) ? Math.round(value) : value.toFixed(1)}${unit}</text>
  </g>`)}</g>`;
}

export function Decisions({ frames, width, from, until, at }) {
  const buckets = decisions(frames, BUCKET_S);
  const reasons = new Set(buckets.flatMap((bucket) => [...bucket.reasons.keys()]));
  if (!reasons.size) return html`<p class="empty">No decision in the time that is kept.</p>`;
  const colour = colours(reasons);
  const totals = new Map();
  buckets.forEach((bucket) => bucket.reasons.forEach((more, reason) => totals.set(reason, (totals.get(reason) || 0) + more)));
  const most = Math.max(...buckets.map((bucket) => [...bucket.reasons.values()].reduce((a, b) => a + b, 0))) / BUCKET_S;
  const x = (moment) => LEFT + (width - LEFT) * (moment - from) / (until - from);
  const tall = HEIGHT - TOP - BOTTOM;
  return html`<figure>
    <svg class="chart" role="img" aria-label="Decisions per second by reason; the list below has the totals" width=${width} height=${HEIGHT}>
      <${Axis} width=${width} most=${most} unit="/s" />
      ${buckets.map((bucket) => {
        let base = TOP + tall;
        const left = Math.max(x(bucket.start), LEFT), right = Math.min(x(bucket.start + BUCKET_S), width);
        return [...colour.keys()].filter((reason) => bucket.reasons.has(reason)).map((reason) => {
          const height = tall * bucket.reasons.get(reason) / BUCKET_S / most;
          base -= height;
          return html`<rect key="${bucket.start} ${reason}" class="series-${colour.get(reason)}" x=${left} y=${base} width=${Math.max(right - left - 1, 1)} height=${height}><title>${`${format.clock(bucket.start)} ${reason}: ${bucket.reasons.get(reason)}`}</title></rect>`;
        });
      })}
      <line class="now" x1=${x(at)} x2=${x(at)} y1=${TOP} y2=${TOP + tall} />
      <text class="tick" x=${LEFT} y=${HEIGHT - 6}>${format.clock(from)}</text>
      <text class="tick" x=${width} y=${HEIGHT - 6} text-anchor="end">${format.clock(until)}</text>
    </svg>
    <ul class="legend">${[...colour].map(([reason, index]) => html`<li key=${reason}><span class="swatch series-${index}"></span>${reason} <b>${format.count(totals.get(reason))}</b></li>`)}</ul>
  </figure>`;
}

export function Lengths({ frame, width }) {
  const counts = frame.requests.uncached_lengths || [];
  const total = counts.reduce((a, b) => a + b, 0);
  if (!total) return html`<p class="empty">No length has been observed in the window.</p>`;
  const thresholds = Object.entries(frame.clusters).filter(([, cluster]) => cluster.threshold_tokens != null);
  const places = thresholds.map(([, cluster]) => 2 * Math.log2(Math.max(cluster.threshold_tokens, 1)));
  const seen = counts.map((_, index) => index).filter((index) => counts[index]);
  const low = Math.floor(Math.max(Math.min(seen[0], ...places) - 2, 0)), high = Math.ceil(Math.max(seen.at(-1) + 1, ...places) + 2);
  const most = Math.max(...counts);
  const x = (place) => LEFT + (width - LEFT - 8) * (place - low) / (high - low);
  const tall = HEIGHT - TOP - BOTTOM;
  const ticks = [];
  for (let place = Math.ceil(low / 2) * 2; place <= high; place += 2 * Math.max(1, Math.ceil((high - low) / 12))) ticks.push(place);
  const above = (tokens) => counts.reduce((sum, number, index) => sum + (2 ** (index / 2) >= tokens ? number : 0), 0) / total;
  return html`<figure>
    <svg class="chart" role="img" aria-label="Uncached lengths of ${total} requests, with thresholds" width=${width} height=${HEIGHT}>
      <${Axis} width=${width} most=${most} unit="" />
      ${seen.map((index) => html`<rect key=${index} class="length" x=${x(index) + 0.5} y=${TOP + tall * (1 - counts[index] / most)} width=${Math.max(x(index + 1) - x(index) - 1, 1)} height=${tall * counts[index] / most}><title>${`from ${format.tokens(2 ** (index / 2))}: ${counts[index]}`}</title></rect>`)}
      ${thresholds.map(([name], index) => html`<g key=${name} class="threshold"><line x1=${x(places[index])} x2=${x(places[index])} y1=${TOP} y2=${TOP + tall} /><text x=${x(places[index]) + 4} y=${TOP + 9 + 12 * index}>${name}</text></g>`)}
      ${ticks.map((place) => html`<text key=${place} class="tick" x=${x(place)} y=${HEIGHT - 6} text-anchor="middle">${short(2 ** (place / 2))}</text>`)}
    </svg>
    <ul class="legend">${thresholds.map(([name, cluster]) => html`<li key=${name}>${name}: threshold <b>${format.count(cluster.threshold_tokens)}</b>${cluster.threshold_held ? ' (held)' : ''}; ${format.percent(above(cluster.threshold_tokens))} are longer</li>`)}</ul>
  </figure>`;
}

const short = (tokens) => tokens >= 1024 ? `${Math.round(tokens / 1024)}K` : String(Math.round(tokens));

export function Pools({ frame }) {
  const pools = Object.entries(frame.pools);
  if (!pools.length) return html`<p class="empty">The deployment has no pools.</p>`;
  return pools.map(([name, pool]) => html`<div class="pool" key=${name}>
    <h3><span class="dot ${pool.up ? 'good' : 'bad'}"></span>${name} <small>${pool.up ? '' : 'does not answer'}</small></h3>
    ${['memory', 'ssd'].filter((tier) => pool.capacity_bytes?.[tier]).map((tier) => {
      const used = pool.bytes[tier] / pool.capacity_bytes[tier];
      return html`<div class="tier" key=${tier}><span>${tier}</span>
        <meter min="0" max="1" value=${used} aria-label="${name} ${tier}">${format.percent(used)}</meter>
        <span>${format.bytes(pool.bytes[tier])} of ${format.bytes(pool.capacity_bytes[tier])}; ${format.count(pool.hit_tokens[tier])} tokens loaded</span></div>`;
    })}</div>`);
}
