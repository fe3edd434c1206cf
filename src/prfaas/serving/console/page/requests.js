// Recent requests: where each went and why, and what its time to first token was made of.

import { html } from '/console/vendor/htm-preact.js';
import * as format from '/console/format.js';

const NAMES = {
  read: 'read', tokenize: 'tokenize', decide: 'decide', cache_transfer: 'move a prefix', turn: 'turn',
  prefill: 'prefill', transfer: 'transfer', first_token: 'first token',
};

// The way to the first byte as pieces that do not overlap. The transfer is what of it comes after the prefill.
export function segments(request) {
  const found = [];
  let end = 0;
  for (const step of ['read', 'tokenize', 'decide', 'cache_transfer', 'turn', 'prefill', 'transfer']) {
    const taken = request.steps[step];
    if (!taken) continue;
    const from = Math.max(taken.after_s, end), until = taken.after_s + taken.took_s;
    if (until > from) { found.push({ step, from, until }); end = until; }
  }
  const first = request.steps.first_byte;
  if (first && first.took_s > end) found.push({ step: 'first_token', from: end, until: first.took_s });
  return found;
}

function Waterfall({ request, scale }) {
  const pieces = segments(request);
  const told = pieces.map((piece) => `${NAMES[piece.step]} ${format.seconds(piece.until - piece.from)}`).join(', ');
  return html`<svg class="waterfall" role="img" aria-label=${told || 'no step has ended'} viewBox="0 0 400 14" preserveAspectRatio="none">
    ${pieces.map((piece) => html`<rect key=${piece.step} class="step-${piece.step}" x=${400 * piece.from / scale} y="1" width=${Math.max(400 * (piece.until - piece.from) / scale, 0.8)} height="12"><title>${`${NAMES[piece.step]} ${format.seconds(piece.until - piece.from)}`}</title></rect>`)}
  </svg>`;
}

function Row({ request, scale, chosen, pinned, onChoose, onPin }) {
  const id = request.request_id;
  const way = request.prefill == null ? '–' : request.prefill === request.decode ? request.decode : `${request.prefill} → ${request.decode}`;
  return html`<tr class=${chosen ? 'chosen' : ''} data-request=${id}>
    <td data-label="at"><button class="link-like" aria-expanded=${chosen} aria-controls="explained" onClick=${() => onChoose(chosen ? null : id)}>${format.clock(request.at_s)}<span class="hidden"> explain ${id.slice(0, 8)}</span></button></td>
    <td data-label="decision"><span class="route ${request.route || ''}">${request.route || request.endpoint}</span> ${request.reason || ''}</td>
    <td class="way" data-label="way">${way}</td>
    <td data-label="prompt">${format.count(request.prompt_tokens)}</td><td data-label="uncached">${format.count(request.uncached_tokens)}</td>
    <td data-label="TTFT">${format.seconds(request.steps.first_byte?.took_s)}</td>
    <td class="wide"><${Waterfall} ...${{ request, scale }} /></td>
    <td data-label="outcome"><span class="dot ${request.outcome === 'ok' ? 'good' : request.outcome === 'under way' ? 'none' : 'bad'}"></span>${request.outcome === 'under way' && request.waits_for ? `waits: ${request.waits_for.replace('_', ' ')}` : request.outcome.replace('_', ' ')}</td>
    <td><button class="small" aria-pressed=${pinned} onClick=${() => onPin(request)}>${pinned ? 'Unpin' : 'Pin'}<span class="hidden"> request ${id.slice(0, 8)}</span></button></td>
  </tr>`;
}

export function Requests({ requests, pinned, chosen, explained, onChoose, onPin }) {
  const isPinned = new Set(pinned.map((request) => request.request_id));
  const shown = [...pinned, ...requests.filter((request) => !isPinned.has(request.request_id))];
  if (!shown.length) return html`<p class="empty">No request has come yet.</p>`;
  const scale = Math.max(0.001, ...shown.map((request) => segments(request).at(-1)?.until || 0));
  return html`<div>
    <ul class="legend">${Object.entries(NAMES).map(([step, name]) => html`<li key=${step}><span class="swatch step-${step}"></span>${name}</li>`)}<li>scale: ${format.seconds(scale)}</li></ul>
    <div class="scroll tall" tabindex="0" role="region" aria-label="Recent requests, table"><table class="requests">
      <thead><tr><th scope="col">at</th><th scope="col">decision</th><th scope="col">way</th><th scope="col">prompt</th><th scope="col">uncached</th><th scope="col">TTFT</th><th scope="col">to the first token</th><th scope="col">outcome</th><th scope="col"><span class="hidden">pin</span></th></tr></thead>
      <tbody>${shown.map((request) => html`<${Row} key=${request.request_id} ...${{ request, scale, onChoose, onPin }} chosen=${chosen === request.request_id} pinned=${isPinned.has(request.request_id)} />`)}</tbody>
    </table></div>
    <div id="explained" aria-live="polite">${chosen && html`<pre class="explained">${explained || 'Asking …'}</pre>`}</div>
  </div>`;
}
