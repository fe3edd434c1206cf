// The map: clusters as boxes, links as arrows. Width is capacity, the filled share is what is carried, colour the state.

import { html } from '/console/vendor/htm-preact.js';
import * as format from '/console/format.js';
import { linkState } from '/console/model.js';

const BOX = { wide: [190, 62], narrow: [150, 62] };

function places(clusters, width) {
  const narrow = width < 480;
  const [boxWidth, boxHeight] = narrow ? BOX.narrow : BOX.wide;
  const sides = [[], []];
  for (const [name, cluster] of Object.entries(clusters)) sides[cluster.kind === 'prfaas' ? 0 : 1].push(name);
  const found = {};
  const gap = narrow ? 110 : 36;
  sides.forEach((names, side) => names.forEach((name, index) => {
    // Narrow: the two kinds are columns that stand apart by the height of the links.
    const x = narrow ? (side ? width - boxWidth - 2 : 2) : (side ? width - boxWidth - 8 : 8);
    const y = 10 + index * (boxHeight + gap) + (narrow && side ? boxHeight + 50 : 0);
    found[name] = { x, y, boxWidth, boxHeight };
  }));
  const height = Math.max(...Object.values(found).map((box) => box.y + box.boxHeight)) + 12;
  return { found, height, narrow };
}

function ends(source, target, narrow, back) {
  const shift = back ? 13 : -13;
  if (narrow || source.x === target.x) {
    const from = { x: source.x + source.boxWidth / 2 + shift, y: source.y < target.y ? source.y + source.boxHeight : source.y };
    return [from, { x: target.x + target.boxWidth / 2 + shift, y: source.y < target.y ? target.y : target.y + target.boxHeight }];
  }
  const right = source.x < target.x;
  return [
    { x: right ? source.x + source.boxWidth : source.x, y: source.y + source.boxHeight / 2 + shift },
    { x: right ? target.x : target.x + target.boxWidth, y: target.y + target.boxHeight / 2 + shift },
  ];
}

function Link({ name, link, found, narrow, most, chosen, onChoose }) {
  const source = found[link.source], target = found[link.target];
  if (!source || !target) return null;
  const [a, b] = ends(source, target, narrow, source.x > target.x);
  const width = 4 + 12 * Math.sqrt((link.capacity_bits_per_s || 0) / most);
  const line = { x1: a.x, y1: a.y, x2: b.x, y2: b.y };
  const share = Math.min(link.utilisation || 0, 1);
  const text = `${name}: ${format.bits(link.egress_bits_per_s)} of ${format.bits(link.capacity_bits_per_s)}, ${link.up ? link.condition : 'down'}`;
  return html`<g class="link ${linkState(link)} ${chosen ? 'chosen' : ''}" onClick=${() => onChoose(name)}>
    <title>${text}</title>
    <line class="capacity" ...${line} stroke-width=${width} />
    <line class="carried" ...${line} stroke-width=${Math.max(width * share, share > 0 ? 1.5 : 0)} />
    <circle class="head" cx=${b.x} cy=${b.y} r=${Math.max(width / 2, 4)} />
  </g>`;
}

export function ClusterMap({ frame, width, chosen, onChoose }) {
  const { found, height, narrow } = places(frame.clusters, width);
  const links = Object.entries(frame.links);
  const most = Math.max(1, ...links.map(([, link]) => link.capacity_bits_per_s || 0));
  const label = `${Object.keys(frame.clusters).length} clusters and ${links.length} links; the table below has the numbers`;
  return html`<svg class="map" role="img" aria-label=${label} width=${width} height=${height} viewBox="0 0 ${width} ${height}">
    ${links.map(([name, link]) => html`<${Link} key=${name} ...${{ name, link, found, narrow, most, onChoose }} chosen=${chosen === name} />`)}
    ${Object.entries(frame.clusters).map(([name, cluster]) => {
      const { x, y, boxWidth, boxHeight } = found[name];
      const instances = Object.values(cluster.instances);
      const up = instances.filter((instance) => instance.healthy).length;
      const second = `${up}/${instances.length} up · ${cluster.waiting_prefills ?? 0} waiting`;
      const third = cluster.kind === 'pd' ? `threshold ${format.count(cluster.threshold_tokens)}` : `prefill on ${cluster.hardware}`;
      return html`<g key=${name} class="cluster ${cluster.kind} ${up < instances.length ? 'hurt' : ''}">
        <rect x=${x} y=${y} width=${boxWidth} height=${boxHeight} rx="8" />
        <text x=${x + 12} y=${y + 21} class="name">${name}</text>
        <text x=${x + 12} y=${y + 38}>${second}</text>
        <text x=${x + 12} y=${y + 53}>${third}</text>
      </g>`;
    })}
  </svg>`;
}

export function LinkTable({ frame, chosen }) {
  const links = Object.entries(frame.links);
  if (!links.length) return html`<p class="empty">The deployment has no links.</p>`;
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Links, table"><table class="numbers">
    <caption class="hidden">Links</caption>
    <thead><tr><th scope="col">link</th><th scope="col">state</th><th scope="col">carries</th><th scope="col">of</th><th scope="col">queued</th><th scope="col">round trip</th><th scope="col">sent again</th></tr></thead>
    <tbody>${links.map(([name, link]) => html`<tr key=${name} class=${chosen === name ? 'chosen' : ''}>
      <th scope="row">${name}</th>
      <td data-label="state"><span class="dot ${linkState(link)}"></span>${link.up ? link.condition : 'down'}</td>
      <td data-label="carries">${format.bits(link.egress_bits_per_s)}</td><td data-label="of">${format.bits(link.capacity_bits_per_s)}</td>
      <td data-label="queued">${format.bytes(link.queued_bytes)}</td><td data-label="round trip">${format.seconds(link.rtt_s)}</td>
      <td data-label="sent again">${link.retransmit_ratio == null ? '–' : `${(100 * link.retransmit_ratio).toFixed(2)} %`}</td>
    </tr>`)}</tbody></table></div>`;
}
