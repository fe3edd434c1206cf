// The console: asks for the history once, follows the frames, and draws the moment that is looked at.

import { html, render, useEffect, useMemo, useRef, useState } from '/console/vendor/htm-preact.js';
import { Refused, follow, get, post, token } from '/console/client.js';
import * as format from '/console/format.js';
import { KEPT_S, frameAt, instancesOf } from '/console/model.js';
import { ClusterMap, LinkTable } from '/console/map.js';
import { Instances, RoleTimeline } from '/console/instances.js';
import { Decisions, Lengths, Pools } from '/console/charts.js';
import { Requests } from '/console/requests.js';
import { Now } from '/console/now.js';
import { Worth } from '/console/worth.js';

const OLD_STEP = 3;
const REQUESTS_MS = 2000;
const SHOWN_REQUESTS = 50;
const RETRY_MS = 2000;

function useWidth() {
  const place = useRef(null);
  const [width, setWidth] = useState(600);
  useEffect(() => {
    const observer = new ResizeObserver(([entry]) => setWidth(Math.max(Math.floor(entry.contentRect.width), 260)));
    observer.observe(place.current);
    return () => observer.disconnect();
  }, []);
  return [place, width];
}

function Sized({ draw }) {
  const [place, width] = useWidth();
  return html`<div ref=${place}>${draw(width)}</div>`;
}

const Panel = ({ id, title, wide, children }) => html`<section class="panel ${wide ? 'full' : ''}" aria-labelledby="${id}-title" id=${id}>
  <h2 id="${id}-title">${title}</h2>${children}</section>`;

// Frames and changes as they come; a lost stream is taken up again with all that is kept.
function useFrames(signedIn, onRefused) {
  const [frames, setFrames] = useState([]);
  const [changes, setChanges] = useState([]);
  const [connected, setConnected] = useState(false);
  useEffect(() => {
    if (!signedIn) return undefined;
    const ending = new AbortController();
    const add = (frame) => {
      setConnected(true);
      setFrames((old) => [...old.filter((each) => each.at_s > frame.at_s - KEPT_S && each.number < frame.number), frame]);
      if (frame.changes.length) setChanges((old) => [...old, ...frame.changes].slice(-500));
    };
    (async () => {
      while (!ending.signal.aborted) {
        try {
          const history = await get(`/prfaas/history?step=${OLD_STEP}`);
          setFrames(history.frames);
          setChanges(history.changes.slice(-500));
          await follow(`/prfaas/events?after=${history.frames.at(-1)?.number ?? 0}`, add, ending.signal);
        } catch (error) {
          if (error instanceof Refused && error.status === 401) return onRefused(error.message);
        }
        setConnected(false);
        await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
      }
      return undefined;
    })();
    return () => ending.abort();
  }, [signedIn]);
  return { frames, changes, connected };
}

function useRequests(signedIn, paused) {
  const [requests, setRequests] = useState([]);
  useEffect(() => {
    if (!signedIn || paused) return undefined;
    const ask = () => get(`/prfaas/requests?limit=${SHOWN_REQUESTS}`).then((told) => setRequests(told.requests), () => {});
    ask();
    const timer = setInterval(ask, REQUESTS_MS);
    return () => clearInterval(timer);
  }, [signedIn, paused]);
  return requests;
}

function SignIn({ message, onToken }) {
  const submit = (event) => {
    event.preventDefault();
    onToken(new FormData(event.target).get('token').trim());
  };
  return html`<main id="main" class="sign-in"><h1>prfaas console</h1>
    <p role="alert">${message}</p>
    <form onSubmit=${submit}><label for="token">Token of the operators</label>
      <input id="token" name="token" type="password" autocomplete="off" required autofocus />
      <button>Open</button></form>
    <p>The token is in the file that <code>gateway.admin.token_file</code> names. This page keeps it until its tab is closed.</p></main>`;
}

function Time({ frames, at, pausedAt, pins, onLook, onPins }) {
  const newest = frames.at(-1).at_s;
  const oldest = frames[0].at_s;
  const pin = () => onPins([...pins.filter((each) => each !== at), at].slice(-8));
  return html`<div class="time" role="group" aria-label="Time">
    <button class="main" id="pause" aria-pressed=${pausedAt != null} onClick=${() => onLook(pausedAt == null ? newest : null)}>${pausedAt == null ? 'Pause' : 'Go live'}</button>
    <input id="scrub" type="range" min=${Math.floor(oldest - newest)} max="0" step="1" value=${Math.round(at - newest)} aria-label="Moment, up to 15 minutes back" aria-valuetext=${`${format.clock(at)}, ${format.ago(newest - at)}`} onInput=${(event) => onLook(newest + Number(event.target.value))} />
    <span class="moment"><b>${format.clock(at)}</b> ${pausedAt == null ? 'live' : format.ago(newest - at)}</span>
    <button id="pin" onClick=${pin}>Pin this moment</button>
    ${pins.map((moment) => html`<span class="pinned" key=${moment}><button onClick=${() => onLook(moment)}>${format.clock(moment)}</button><button class="small" onClick=${() => onPins(pins.filter((each) => each !== moment))}><span aria-hidden="true">×</span><span class="hidden">unpin ${format.clock(moment)}</span></button></span>`)}
  </div>`;
}

const Alarm = ({ alarm }) => html`<li class=${alarm.severity}><b>${alarm.severity}</b> ${alarm.what} <small>since ${format.clock(alarm.since_s)}</small></li>`;

// Many of one kind are one trouble: the first is told, the others are behind it.
function Alarms({ alarms }) {
  if (!alarms.length) return html`<p class="all-well"><span class="dot good"></span>No alarms.</p>`;
  const kinds = new Map();
  alarms.forEach((alarm) => kinds.set(alarm.kind, [...(kinds.get(alarm.kind) || []), alarm]));
  return [...kinds].map(([kind, [first, ...others]]) => html`<div key=${kind}>
    <ul class="alarms"><${Alarm} alarm=${first} /></ul>
    ${others.length > 0 && html`<details class="others"><summary>${others.length} more like this</summary><ul class="alarms">${others.map((alarm) => html`<${Alarm} key=${alarm.about} alarm=${alarm} />`)}</ul></details>`}
  </div>`);
}

function Thresholds({ frame, mayChange, onThreshold }) {
  const clusters = Object.entries(frame.clusters).filter(([, cluster]) => cluster.kind === 'pd');
  const submit = (name) => (event) => {
    event.preventDefault();
    onThreshold(name, Number(new FormData(event.target).get('tokens')));
  };
  return clusters.map(([name, cluster]) => html`<form class="threshold-form" key=${name} onSubmit=${submit(name)}>
    <label for="threshold-${name}">Threshold of ${name}, tokens</label>
    <input id="threshold-${name}" name="tokens" type="number" min="1" max="1000000000" required disabled=${!mayChange} placeholder=${cluster.threshold_tokens == null ? '' : Math.round(cluster.threshold_tokens)} />
    <button disabled=${!mayChange}>Hold</button>
    ${cluster.threshold_held && html`<button type="button" disabled=${!mayChange} onClick=${() => onThreshold(name, null)}>Search again</button>`}
  </form>`);
}

function Simulate() {
  const [found, setFound] = useState(null);
  const [problem, setProblem] = useState('');
  const ask = () => get('/prfaas/scenario').then((told) => { setFound(told); setProblem(''); }, (error) => setProblem(error.message));
  const save = () => {
    const link = document.createElement('a');
    link.href = URL.createObjectURL(new Blob([found.trace], { type: 'application/jsonl' }));
    link.download = found.trace_name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };
  return html`<div class="simulate">
    <p>The lengths and arrivals of the kept requests, with links and thresholds as they are now.</p>
    <button id="simulate-ask" onClick=${ask}>Simulate from here</button>
    <div aria-live="polite">${problem && html`<p class="problem">${problem}</p>`}${found && html`
      <p>${format.count(found.requests)} requests of ${format.seconds(found.span_s)}. Save the trace beside the deployment file, then run:</p>
      <pre tabindex="0">${found.command}</pre>
      <p>If that file has no <code>workload</code>, add this line to it first:</p>
      <pre tabindex="0">${found.workload}</pre>
      <button id="simulate-save" onClick=${save}>Save ${found.trace_name}</button>
      ${found.notes.length > 0 && html`<ul>${found.notes.map((note) => html`<li key=${note}>${note}</li>`)}</ul>`}`}</div>
  </div>`;
}

function Console({ facts, onRefused }) {
  const { frames, changes, connected } = useFrames(true, onRefused);
  const [lookedAt, setLookedAt] = useState(null);
  const [moments, setMoments] = useState([]);
  const [pinned, setPinned] = useState([]);
  const [chosen, setChosen] = useState(null);
  const [explained, setExplained] = useState('');
  const [link, setLink] = useState(null);
  const [said, setSaid] = useState('');
  const requests = useRequests(true, lookedAt != null);
  const newest = frames.at(-1)?.at_s;
  const at = lookedAt == null ? newest : Math.max(lookedAt, frames[0]?.at_s ?? 0);
  const frame = useMemo(() => frames.length ? frameAt(frames, at) : null, [frames, at]);
  useEffect(() => {
    setExplained('');
    if (chosen) get(`/prfaas/requests/${encodeURIComponent(chosen)}`).then((told) => setExplained(told.text.join('\n')), (error) => setExplained(error.message));
  }, [chosen]);
  if (!frame) return html`<p class="loading">Waiting for the first frame …</p>`;
  const mayChange = facts.may_change && lookedAt == null;
  const change = (asked, done) => asked.then(() => setSaid(done), (error) => setSaid(error.message));
  const onDrain = (name, closed) => change(post(`/prfaas/instances/${encodeURIComponent(name)}/${closed ? 'undrain' : 'drain'}`), closed ? `${name} takes part again.` : `${name} gets no new work.`);
  const onThreshold = (name, tokens) => change(post(`/prfaas/clusters/${encodeURIComponent(name)}/threshold`, { tokens }), tokens == null ? `The threshold of ${name} is searched again.` : `The threshold of ${name} is held at ${format.tokens(tokens)}.`);
  const onPin = (request) => setPinned((old) => old.some((each) => each.request_id === request.request_id) ? old.filter((each) => each.request_id !== request.request_id) : [...old, request]);
  const from = newest - Math.min(KEPT_S, Math.max(newest - frames[0].at_s, 60)), until = newest;
  const instances = instancesOf(frame);
  const span = { frames, from, until, at };
  return html`
    <header>
      <div class="title"><h1>${facts.deployment}</h1><p>${facts.model} · policy ${facts.policy} · ${instances.filter((each) => each.healthy).length}/${instances.length} instances up · <b id="rate">${format.rate(frame.requests.per_s)}</b> · <span id="routed">${format.count(frame.requests.routed)}</span> decided</p></div>
      <p class="connection" role="status"><span class="dot ${connected ? 'good' : 'bad'}"></span>${connected ? 'connected' : 'not connected: trying again'}</p>
      <${Time} ...${{ frames, at, pausedAt: lookedAt, pins: moments, onLook: setLookedAt, onPins: setMoments }} />
    </header>
    <main id="main">
      <p class="said" role="status">${said}</p>
      ${!facts.may_change && html`<p class="note">This page can only look: draining and thresholds need <code>gateway.admin.token_file</code> in the deployment file.</p>`}
      ${facts.may_change && lookedAt != null && html`<p class="note">A past moment is shown. Go live to change something.</p>`}
      <${Panel} id="now" title="Now" wide><${Now} ...${{ frame, frames, at }} /><//>
      <${Panel} id="alarms" title="Alarms" wide><div aria-live="polite"><${Alarms} alarms=${frame.alarms} /></div><//>
      <${Panel} id="map" title="Clusters and links"><${Sized} draw=${(width) => html`<${ClusterMap} ...${{ frame, width }} chosen=${link} onChoose=${setLink} />`} /><${LinkTable} frame=${frame} chosen=${link} /><//>
      <${Panel} id="decisions" title="Decisions"><${Sized} draw=${(width) => html`<${Decisions} ...${span} width=${width} />`} />
        <h3>Uncached lengths in the window</h3><${Sized} draw=${(width) => html`<${Lengths} frame=${frame} width=${width} />`} />
        <${Thresholds} ...${{ frame, mayChange, onThreshold }} /><//>
      <${Panel} id="instances" title="Instances" wide><${Instances} ...${span} frame=${frame} mayChange=${mayChange} onDrain=${onDrain} /><//>
      <${Panel} id="requests" title="Recent requests" wide><${Requests} requests=${requests.filter((each) => each.at_s <= at + 1)} ...${{ pinned, chosen, explained, onPin }} onChoose=${setChosen} /><//>
      <${Panel} id="worth" title="Worth" wide><${Worth} isKept=${facts.keeps_ledger} /><//>
      <${Panel} id="roles" title="Roles"><${RoleTimeline} ...${span} /><//>
      <${Panel} id="pools" title="Pools"><${Pools} frame=${frame} /><//>
      <${Panel} id="changes" title="What changed"><ol class="changes" tabindex="0" aria-label="What changed">${changes.filter((each) => each.at_s <= at + 0.001).slice(-40).reverse().map((each, index) => html`<li key="${each.at_s} ${index}"><time>${format.clock(each.at_s)}</time> ${each.what}</li>`)}</ol>${!changes.length && html`<p class="empty">Nothing yet.</p>`}<//>
      <${Panel} id="simulate" title="Simulate"><${Simulate} /><//>
    </main>
    <footer>prfaas ${facts.version}</footer>`;
}

function App() {
  const [facts, setFacts] = useState(null);
  const [refused, setRefused] = useState('');
  const ask = () => get('/prfaas/console').then((told) => {
    document.title = `${told.deployment} – prfaas console`;
    setRefused('');
    setFacts(told);
  }, (error) => {
    setRefused(error.status === 401 && !token.get() ? 'This console asks for a token.' : error.status === 401 ? 'That is not the token.' : error.message);
    token.set('');
  });
  useEffect(() => { ask(); }, []);
  if (refused) return html`<${SignIn} message=${refused} onToken=${(text) => { token.set(text); ask(); }} />`;
  if (!facts) return html`<p class="loading">Loading …</p>`;
  return html`<${Console} facts=${facts} onRefused=${(message) => { setFacts(null); setRefused(message); }} />`;
}

const root = document.getElementById('app');
root.textContent = '';
render(html`<${App} />`, root);
