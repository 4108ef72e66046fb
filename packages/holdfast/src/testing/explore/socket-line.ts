import { setImmediate as turn } from "node:timers/promises";
import type { Socket } from "node:net";
import type { ProtocolAnswer, Protocol, ProtocolReader, Self } from "../../seam/protocol-reader.ts";
import type { Actor, ActorStep } from "./actor.ts";
import { type Pass, type Write, bytes, readerOf, send } from "./listen.ts";

/** For what is left after a run that was given up. */
export const clearMs = 1000;

/** What a line needs to talk for itself. */
export type LineProtocol = Pick<Protocol<never>, "reader" | "statement" | "who" | "self">;

/** What was kept back, as it is to be written. */
export interface HeldBytes {
  readonly step: ActorStep;
  readonly actor: Actor;
  readonly writes: Parameters<Write>[];
  /** Requests that these are. */
  requests: number;
}

/** Sent, and not answered. */
export interface SentStep {
  readonly step: ActorStep;
  readonly actor: Actor;
}

/** What the server said to a statement of ours. */
export interface Told {
  readonly rows: ProtocolAnswer["rows"][number][];
  readonly heard: Buffer[];
  error: string | undefined;
}

/** One connection to the server: what goes through it, and statements of ours in between. */
export class SocketLine {
  /** To tell it from the others. */
  readonly id: number;
  readonly socket: Socket;
  readonly reader: ProtocolReader;
  held: HeldBytes | undefined;
  sent: SentStep | undefined;
  /** Who used it last in this run. */
  user: Actor | undefined;
  /** For whom its session was told what it was told. */
  told: Actor | undefined;
  /** What the session was told of ours. */
  settings = "";
  /** An actor or the invariant has used it at all. */
  theirs = false;
  self: Self | undefined;
  /** Of the server, as it was known last. */
  session: string | undefined;
  /** A transaction of ours is around the client's statement: what it was answered is kept until that has ended. */
  around: { readonly heard: Buffer[]; readonly begins: boolean; pass: Pass | undefined } | undefined;
  /** What is to be heard of it later. */
  later: (() => void)[] | undefined;
  readonly #protocol: LineProtocol;
  /** Waits for the answer to a statement of ours, which the client does not see. */
  #ours: { readonly reader: ProtocolReader; readonly told: Told; done(): void } | undefined;

  constructor(id: number, socket: Socket, protocol: LineProtocol) {
    this.id = id;
    this.socket = socket;
    this.#protocol = protocol;
    this.reader = readerOf(socket, () => protocol.reader());
  }

  /** The server has answered everything that it was sent. */
  get quiet(): boolean {
    return this.reader.unanswered <= (this.held?.requests ?? 0);
  }

  get busy(): boolean {
    return !this.socket.destroyed && (this.#ours !== undefined || this.around !== undefined || !this.quiet);
  }

  /** Whether it belongs to what is held back: then it is, too. */
  keeps(args: Parameters<Write>): boolean {
    const { held, reader } = this;
    if (!held) return false;
    const { unanswered } = reader;
    const more = reader.sent(bytes(args));
    held.requests += reader.unanswered - unanswered;
    held.writes.push(args);
    const { step: waiting } = held;
    const all = reader.text?.();
    if (all) waiting.text = all;
    else if (more) waiting.text += waiting.text ? `; ${more}` : more;
    return true;
  }

  /** What is held back goes out. */
  letGo(): void {
    const writes = this.held?.writes ?? [];
    this.held = undefined;
    for (const args of writes) send(this.socket, ...args);
  }

  /** Errors of settings do not matter: a session without the right to be told that behaves as it did. */
  async tell(text: string): Promise<Told> {
    const told: Told = { rows: [], heard: [], error: undefined };
    const { socket } = this;
    // What passed before it has its own answer.
    const until = performance.now() + clearMs;
    while (!this.quiet && !socket.destroyed && performance.now() < until) await turn();
    // The pool may be about to close it.
    if (!socket.writable || !this.quiet) return { ...told, error: "the connection was closed" };
    const { promise, resolve } = Promise.withResolvers<void>();
    // Its own, since the other one may be in the middle of a statement that is held back.
    const reader = this.#protocol.reader();
    const message = this.reader.statement?.(text) ?? this.#protocol.statement(text);
    reader.sent(message);
    socket.once("close", resolve);
    this.#ours = { reader, told, done: resolve };
    send(socket, message);
    await promise;
    socket.off("close", resolve);
    this.reader.inside = reader.inside ?? this.reader.inside;
    return told;
  }

  /** Whether it is of the answer to a statement of ours. */
  tells(chunk: Buffer): boolean {
    const ours = this.#ours;
    if (!ours) return false;
    const { rows, error, ready } = ours.reader.received(chunk);
    ours.told.rows.push(...rows);
    ours.told.heard.push(chunk);
    ours.told.error ??= error;
    if (ready) {
      this.#ours = undefined;
      ours.done();
    }
    return true;
  }

  /** Asks who it is on the server. A session that cannot say it now is asked again. */
  async identify(): Promise<Self | undefined> {
    const { rows } = await this.tell(this.#protocol.who);
    this.self = this.#protocol.self(rows, this.socket.localPort);
    this.session = this.self?.session;
    return this.self;
  }

  /** Asks what the statement that is held back depends on. */
  async learn(held: ActorStep, unknown: string): Promise<void> {
    this.reader.learn?.((await this.tell(unknown)).rows);
    held.text = this.reader.text?.() ?? held.text;
  }
}
