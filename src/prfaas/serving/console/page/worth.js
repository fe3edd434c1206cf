// What offloading was worth, from the ledger of this gateway: as `prfaas worth` says it.

import { html, useEffect, useState } from '/console/vendor/htm-preact.js';
import { get } from '/console/client.js';
import * as format from '/console/format.js';

const KINDS = { length: 'length of the prompt', hour: 'hour', 'hour-of-day': 'hour of the day', cluster: 'cluster', link: 'link', tenant: 'tenant' };
const SPANS = { 1: 'hour', 24: 'day', 168: 'week', 0: 'all that is kept' };
const AGAIN_MS = 60000;

const signed = (value, text) => value == null ? '–' : `${value < 0 ? '−' : '+'}${text(Math.abs(value))}`;
const COLUMNS = {
  requests: (row) => format.count(row.requests),
  offloaded: (row) => format.count(row.offloaded),
  'first token': (row) => format.seconds(row.mean_with_s),
  without: (row) => format.seconds(row.mean_without_s),
  sooner: (row) => signed(row.saved_share, format.percent),
  'GPU-s moved': (row) => format.count(row.gpu_s_moved),
  spent: (row) => format.count(row.gpu_s_spent),
  egress: (row) => format.bytes(row.egress_bytes),
  net: (row) => signed(row.net, (value) => value.toFixed(2)),
  'off by': (row) => signed(row.bias_of_offloaded, format.percent),
};

const Choice = ({ id, label, of, value, onChoose }) => html`<label for=${id}>${label}</label>
  <select id=${id} value=${value} onChange=${(event) => onChoose(event.target.value)}>${Object.entries(of).map(([key, name]) => html`<option key=${key} value=${key}>${name}</option>`)}</select>`;

export function Worth({ isKept }) {
  const [by, setBy] = useState('length');
  const [hours, setHours] = useState('24');
  const [told, setTold] = useState(null);
  const [problem, setProblem] = useState('');
  useEffect(() => {
    if (!isKept) return undefined;
    let isAsked = true;
    const ask = () => get(`/prfaas/worth?by=${by}&hours=${hours}`).then(
      (found) => { if (isAsked) { setTold(found); setProblem(''); } }, (error) => isAsked && setProblem(error.message));
    ask();
    const timer = setInterval(ask, AGAIN_MS);
    return () => { isAsked = false; clearInterval(timer); };
  }, [isKept, by, hours]);
  if (!isKept) return html`<p class="empty">No ledger is kept: <code>gateway.ledger</code> in the deployment file names one.</p>`;
  return html`<div class="worth">
    <p class="choices"><${Choice} id="worth-by" label="By" of=${KINDS} value=${by} onChoose=${setBy} /> <${Choice} id="worth-hours" label="of the last" of=${SPANS} value=${hours} onChoose=${setHours} /></p>
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    ${told && !told.rows.length && html`<p class="empty">No request was routed in that time.</p>`}
    ${told?.sentences.map((sentence) => html`<p key=${sentence}>${sentence}</p>`)}
    ${told?.rows.length > 0 && html`<div class="scroll tall" tabindex="0" role="region" aria-label="Worth, table"><table class="numbers">
      <thead><tr><th scope="col">${KINDS[told.by]}</th>${Object.keys(COLUMNS).map((name) => html`<th scope="col" key=${name}>${name}</th>`)}</tr></thead>
      <tbody>${told.rows.map((row) => html`<tr key=${row.key} data-worth=${row.key.trim()}><th scope="row">${row.key.trim() || '–'}</th>${Object.entries(COLUMNS).map(([name, said]) => html`<td key=${name} data-label=${name}>${said(row)}</td>`)}</tr>`)}</tbody>
    </table></div>`}
  </div>`;
}
