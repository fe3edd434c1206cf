// Instances as heat strips: role, queue, slots and KVCache now, and how busy each was over the time that is kept.

import { html } from '/console/vendor/htm-preact.js';
import * as format from '/console/format.js';
import { heat, instancesOf, loadOf, runs } from '/console/model.js';

const Cell = ({ share, text, label }) => html`<td class="heat" data-label=${label} data-heat=${heat(share)} aria-label="${label} ${text}">${text}</td>`;

function stateOf(instance) {
  if (!instance.healthy) return ['bad', 'out'];
  if (instance.drain) return ['warn', instance.drain];
  return instance.draining ? ['warn', 'converting'] : ['good', 'in routing'];
}

function Strip({ name, frames, from, until }) {
  const value = (frame) => {
    const instance = instancesOf(frame).find((each) => each.name === name);
    return instance ? heat(loadOf(instance)) : null;
  };
  const x = (at) => 300 * Math.max(at - from, 0) / (until - from);
  return html`<svg class="strip" viewBox="0 0 300 14" preserveAspectRatio="none" aria-hidden="true">
    ${runs(frames, value).filter((run) => run.value != null).map((run) =>
      html`<rect key=${run.from} class="heat-fill" data-heat=${run.value} x=${x(run.from)} y="0" width=${Math.max(x(run.until) - x(run.from), 0.5)} height="14" />`)}
  </svg>`;
}

export function Instances({ frame, frames, from, until, mayChange, onDrain }) {
  return Object.entries(frame.clusters).map(([cluster, facts]) => html`<div key=${cluster}>
    <h3>${cluster} <small>${facts.kind === 'prfaas' ? 'prefill only' : 'prefill and decode'}</small></h3>
    <div class="scroll" tabindex="0" role="region" aria-label="Instances of ${cluster}, table"><table class="strips">
      <thead><tr><th scope="col">instance</th><th scope="col">role</th><th scope="col">state</th><th scope="col">queue</th><th scope="col">slots</th><th scope="col">KVCache</th><th scope="col">last 15 min</th><th scope="col"><span class="hidden">change</span></th></tr></thead>
      <tbody>${Object.entries(facts.instances).map(([name, instance]) => {
        const [tone, state] = stateOf(instance);
        const slots = instance.decode_slots ? (instance.decoding || 0) / instance.decode_slots : null;
        const closed = instance.drain != null;
        return html`<tr key=${name}>
          <th scope="row">${name}</th>
          <td data-label="role"><span class="role ${instance.role.replace('+', '-')}">${instance.role}</span></td>
          <td data-label="state" title=${instance.suspicion || ''}><span class="dot ${tone}"></span>${state}</td>
          <${Cell} label="queue" share=${Math.min((instance.queue || 0) / 5, 1)} text=${format.count(instance.queue)} />
          ${slots == null ? html`<td data-label="slots">–</td>` : html`<${Cell} label="slots" share=${slots} text="${instance.decoding}/${instance.decode_slots}" />`}
          ${instance.kv_usage == null ? html`<td data-label="KVCache">–</td>` : html`<${Cell} label="KVCache" share=${instance.kv_usage} text=${format.percent(instance.kv_usage)} />`}
          <td class="wide" data-label="last 15 min"><${Strip} ...${{ name, frames, from, until }} /></td>
          <td><button class="small" data-drain=${name} disabled=${!mayChange} onClick=${() => onDrain(name, closed)}>${closed ? 'Undrain' : 'Drain'}<span class="hidden"> ${name}</span></button></td>
        </tr>`;
      })}</tbody></table></div></div>`);
}

export function RoleTimeline({ frames, from, until, at }) {
  const names = instancesOf(frames.at(-1)).filter((instance) => instance.kind === 'pd').map((instance) => instance.name);
  const x = (moment) => 1000 * Math.max(moment - from, 0) / (until - from);
  const roleOf = (name) => (frame) => {
    const instance = instancesOf(frame).find((each) => each.name === name);
    return instance ? (instance.healthy ? instance.role.replace('+', '-') : 'out') : null;
  };
  return html`<div class="roles" role="list" aria-label="Roles over the last 15 minutes">${names.map((name) => {
    const found = runs(frames, roleOf(name)).filter((run) => run.value != null);
    const told = found.map((run) => `${run.value} from ${format.clock(run.from)}`).join(', ');
    return html`<div class="role-row" role="listitem" key=${name}><span class="role-name">${name}</span>
      <svg role="img" aria-label=${told} viewBox="0 0 1000 16" preserveAspectRatio="none">
        ${found.map((run) => html`<rect key=${run.from} class="role-fill ${run.value}" x=${x(run.from)} y="0" width=${Math.max(x(run.until) - x(run.from), 1)} height="16"><title>${run.value}</title></rect>`)}
        <line class="now" x1=${x(at)} x2=${x(at)} y1="0" y2="16" />
      </svg></div>`;
  })}</div>`;
}
