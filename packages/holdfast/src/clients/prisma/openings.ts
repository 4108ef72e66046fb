/** On which of a client's extensions a transaction is opened: they share one instance, and their transactions have what they have. */
import { AsyncLocalStorage } from "node:async_hooks";

interface Extended {
  readonly _originalClient?: object;
}

export const openers = new AsyncLocalStorage<Extended>();

/** The one that is to be opened on here; `client` if that is none of the same client's. */
export function openerOf<Client extends object>(client: Client): Client {
  const opener = openers.getStore();
  return opener && original(opener) === original(client) ? (opener as Client) : client;
}

function original(client: Extended): object {
  return client._originalClient ?? client;
}
