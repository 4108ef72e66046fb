/**
 * Requests to a server in this process: it answers them in another asynchronous context than the one they were sent in, so
 * that what it does for an actor would be nobody's.
 */
import type { AsyncLocalStorage } from "node:async_hooks";
import { subscribe, unsubscribe } from "node:diagnostics_channel";
import type { IncomingMessage } from "node:http";

type Emit = (event: string | symbol, ...rest: unknown[]) => boolean;

export class Requests<T> {
  readonly #current: AsyncLocalStorage<T>;
  readonly #sender: (port: number) => T | undefined;

  /** `sender`: who has sent something last from this port. */
  constructor(current: AsyncLocalStorage<T>, sender: (port: number) => T | undefined) {
    this.#current = current;
    this.#sender = sender;
    subscribe("http.server.request.start", this.#starts);
  }

  end(): void {
    unsubscribe("http.server.request.start", this.#starts);
  }

  readonly #starts = (message: unknown): void => {
    const { request } = message as { request: IncomingMessage };
    const sender = this.#sender(request.socket.remotePort ?? -1);
    if (sender === undefined) return;
    // For the server's listeners, which are called next; and for the body, whose parts arrive in the connection's context.
    this.#current.enterWith(sender);
    const emit = request.emit.bind(request) as Emit;
    (request as { emit: Emit }).emit = (event, ...rest) =>
      this.#current.run(sender, () => emit(event, ...rest));
  };
}
