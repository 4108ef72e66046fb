/**
 * Requests to a server in this process: it answers them in another asynchronous context than the one they were sent in, so
 * that what it does for an actor would be nobody's.
 */
import type { AsyncLocalStorage } from "node:async_hooks";
import { subscribe, unsubscribe } from "node:diagnostics_channel";
import type { ClientRequest, IncomingMessage } from "node:http";
import type { Socket } from "node:net";

type Emit = (event: string | symbol, ...rest: unknown[]) => boolean;

/** What is known of a request, of node:http or of fetch. */
interface Asked {
  readonly method?: string;
  readonly path?: string;
}

interface Sent<T> {
  readonly sender: T;
  readonly asked: Asked;
  /** The server has it. */
  arrived: boolean;
}

export class Requests<T> {
  readonly #current: AsyncLocalStorage<T>;
  readonly #present: (sender: T | undefined) => T | undefined;
  readonly #lastOn: (port: number) => T | undefined;
  /** Whose they are: they may be queued until a connection is free, and are then sent in the context of the one before. */
  readonly #senders = new WeakMap<object, T>();
  /** The last one on each connection, the oldest first. */
  readonly #sent = new Map<Socket, Sent<T>>();
  readonly #channels: readonly (readonly [string, (message: unknown) => void])[] = [
    [
      "http.client.request.created",
      (message) => this.#created((message as { request: ClientRequest }).request),
    ],
    ["undici:request:create", (message) => this.#noteSender((message as { request: object }).request)],
    ["undici:client:sendHeaders", (message) => this.#isSent(message as { request: Asked; socket: Socket })],
    [
      "http.server.request.start",
      (message) => this.#starts((message as { request: IncomingMessage }).request),
    ],
  ];

  /** `present`: none, if it has ended. `lastOn`: who has sent something last from this port. */
  constructor(
    current: AsyncLocalStorage<T>,
    present: (sender: T | undefined) => T | undefined,
    lastOn: (port: number) => T | undefined,
  ) {
    this.#current = current;
    this.#present = present;
    this.#lastOn = lastOn;
    for (const [name, listener] of this.#channels) subscribe(name, listener);
  }

  end(): void {
    for (const [name, listener] of this.#channels) unsubscribe(name, listener);
    this.#sent.clear();
  }

  #noteSender(request: object): boolean {
    const sender = this.#present(this.#current.getStore());
    if (sender !== undefined) this.#senders.set(request, sender);
    return sender !== undefined;
  }

  #created(request: ClientRequest): void {
    if (this.#noteSender(request)) request.once("socket", (socket) => this.#isSent({ request, socket }));
  }

  #isSent({ request, socket }: { readonly request: Asked; readonly socket: Socket }): void {
    const sender = this.#present(this.#senders.get(request));
    if (!this.#sent.delete(socket)) socket.once("close", () => this.#sent.delete(socket));
    if (sender !== undefined) this.#sent.set(socket, { sender, asked: request, arrived: false });
  }

  /** By the ports of its connection. A Unix socket has none: then the oldest of those that ask for the same. */
  #senderOf({ socket: { remotePort }, method, url }: IncomingMessage): T | undefined {
    const all = [...this.#sent];
    const [, found] =
      remotePort === undefined
        ? (all.find(
            ([{ localPort }, { asked, arrived }]) =>
              localPort === undefined && !arrived && asked.method === method && asked.path === url,
          ) ?? [])
        : (all.find(([{ localPort }]) => localPort === remotePort) ?? []);
    if (found) found.arrived = true;
    return this.#present(found?.sender) ?? (remotePort === undefined ? undefined : this.#lastOn(remotePort));
  }

  #starts(request: IncomingMessage): void {
    const sender = this.#senderOf(request);
    if (sender === undefined) return;
    // For the server's listeners, which are called next; and for the body, whose parts arrive in the connection's context.
    this.#current.enterWith(sender);
    const emit = request.emit.bind(request) as Emit;
    (request as { emit: Emit }).emit = (event, ...rest) =>
      this.#current.run(sender, () => emit(event, ...rest));
  }
}
