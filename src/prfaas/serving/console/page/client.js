// What the page asks the gateway. The token goes in a header: it never stands in an address.

const TOKEN_KEY = 'prfaas-token';

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const token = {
  get: () => sessionStorage.getItem(TOKEN_KEY) || '',
  set: (text) => text ? sessionStorage.setItem(TOKEN_KEY, text) : sessionStorage.removeItem(TOKEN_KEY),
};

async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (token.get()) headers.Authorization = `Bearer ${token.get()}`;
  const response = await fetch(path, { ...options, headers, cache: 'no-store', redirect: 'error' });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new Refused(response.status, body?.error?.message || `The gateway answered ${response.status}.`);
}

export const get = async (path) => (await ask(path)).json();

export async function post(path, body) {
  const options = { method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify(body ?? {}) };
  return (await ask(path, options)).json();
}

// Server-sent events by fetch, since an EventSource can't send the token. Ends when the stream does, or throws.
export async function follow(path, onFrame, signal) {
  const response = await ask(path, { signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (rest + value).split('\n\n');
    rest = events.pop();
    for (const event of events) {
      const data = event.split('\n').find((line) => line.startsWith('data: '));
      if (data) onFrame(JSON.parse(data.slice(6)));
    }
  }
}
