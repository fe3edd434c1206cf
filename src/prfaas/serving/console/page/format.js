// Numbers as people read them. What is not known is a dash.

const NONE = '–';

function scaled(value, base, names, unit) {
  if (value == null) return NONE;
  let step = 0;
  while (Math.abs(value) >= base && step < names.length - 1) { value /= base; step += 1; }
  const digits = value === 0 || Math.abs(value) >= 100 || step === 0 && Number.isInteger(value) ? 0 : 1;
  return `${value.toFixed(digits)} ${names[step]}${unit}`.trim();
}

export const bits = (perSecond) => scaled(perSecond, 1000, ['', 'k', 'M', 'G', 'T'], 'bit/s');
export const bytes = (count) => scaled(count, 1024, ['', 'Ki', 'Mi', 'Gi', 'Ti'], 'B');
export const count = (value) => value == null ? NONE : Math.round(value).toLocaleString('en');
export const tokens = (value) => value == null ? NONE : `${count(value)} tokens`;
export const percent = (share) => share == null ? NONE : `${Math.round(100 * share)} %`;
export const rate = (perSecond) => perSecond == null ? NONE : `${perSecond.toFixed(perSecond < 10 ? 2 : 0)}/s`;

export function seconds(value) {
  if (value == null) return NONE;
  if (value < 0.001) return `${Math.round(value * 1e6)} µs`;
  if (value < 1) return `${Math.round(value * 1e3)} ms`;
  return value < 100 ? `${value.toFixed(2)} s` : `${Math.round(value)} s`;
}

export const clock = (unixSeconds) => new Date(1000 * unixSeconds).toLocaleTimeString('en-GB');

export function ago(age) {
  const whole = Math.round(age);
  if (whole <= 0) return 'now';
  return whole < 60 ? `${whole} s ago` : `${Math.floor(whole / 60)} min ${whole % 60} s ago`;
}
