// The three first questions: is it well, does offloading pay now, and what is the bottleneck.

import { html } from '/console/vendor/htm-preact.js';
import * as format from '/console/format.js';
import { bottleneck, instancesOf } from '/console/model.js';

const BUSY = 0.8;

export function well(frame) {
  const [worst] = [...frame.alarms].sort((a, b) => (b.severity === 'critical') - (a.severity === 'critical'));
  if (worst) return [worst.severity === 'critical' ? 'bad' : 'warn', worst.severity === 'critical' ? 'No' : 'Mostly', worst.what];
  const instances = instancesOf(frame);
  const ended = frame.served?.now?.ended || 0;
  return ['good', 'Yes', `All ${instances.length} instances answer, and of ${format.count(ended)} requests in the last minute none was refused or failed.`];
}

export function pays(lately) {
  if (!lately?.ended) return ['none', '–', 'No request has ended in the last five minutes.'];
  const of = `${format.count(lately.offloaded)} of ${format.count(lately.ended)} requests in the last five minutes`;
  if (!lately.offloaded) return ['none', 'Not used', `None of ${format.count(lately.ended)} requests in the last five minutes was offloaded; Decisions has the reasons.`];
  if (!lately.compared) return ['none', 'Not known', `${of} were offloaded. With gateway.ledger in the deployment file each says what its own cluster would have taken.`];
  const [came, home] = [lately.first_token_s / lately.compared, lately.at_home_s / lately.compared];
  const share = Math.round(100 * Math.abs(1 - came / home));
  const paid = lately.egress_cost ? ` Egress costs ${(12 * lately.egress_cost).toPrecision(3)} an hour.` : '';
  const what = `${of} were offloaded: first tokens after ${format.seconds(came)}, at home ${format.seconds(home)} were predicted.${paid}`;
  return came < home ? ['good', `${share} % sooner`, what] : ['warn', `${share} % later`, what];
}

function narrowest(frames, at) {
  const found = bottleneck(frames, at);
  if (!found) return ['none', '–', 'Nothing is measured yet.'];
  const said = `${found.what}: ${format.percent(found.share)} in the last minute.`;
  return found.share >= BUSY ? ['warn', found.short, said] : ['good', 'None', `The busiest is ${said}`];
}

const Answer = ({ id, question, answer: [tone, word, why] }) => html`<div class="answer" id=${id}>
  <dt>${question}</dt><dd><b><span class="dot ${tone}"></span>${word}</b> ${why}</dd></div>`;

export const Now = ({ frame, frames, at }) => html`<dl class="now-answers">
  <${Answer} id="now-well" question="Is it well?" answer=${well(frame)} />
  <${Answer} id="now-pays" question="Does offloading pay?" answer=${pays(frame.served?.lately)} />
  <${Answer} id="now-bottleneck" question="What is the bottleneck?" answer=${narrowest(frames, at)} />
</dl>`;
