/**
 * Holds back what actors send to the server until it is their turn. It sits at the socket, so that it does not matter
 * which driver or ORM they use; an AsyncLocalStorage tells whose statement it is.
 */
import { AsyncLocalStorage } from "node:async_hooks";
import { Socket } from "node:net";
import type { Wire, WireReader } from "../../core/wire.ts";
import { sites } from "../../core/site.ts";

export type ActorState = "running" | "gated" | "sent" | "done";

export interface Step {
  readonly actor: number;
  readonly text: string;
  readonly place: string | undefined;
  rows: (readonly string[])[];
  error: string | undefined;
  /** Names of the actors that it had to wait for. */
  waitedFor: Set<string>;
}

/** One of the functions under test, in one run. */
export class Actor {
  readonly index: number;
  readonly name: string;
  state: ActorState = "running";
  /** Known to wait for another one. */
  blocked = false;
  /** Held back, or sent and not answered yet. */
  step: Step | undefined;
  line: Line | undefined;
  result: PromiseSettledResult<unknown> | undefined;

  constructor(index: number, name: string) {
    this.index = index;
    this.name = name;
  }
}

type Write = (chunk: Uint8Array | string, ...rest: unknown[]) => boolean;

/** One connection to the server. */
interface Line {
  readonly socket: Socket;
  readonly reader: WireReader;
  held: Parameters<Write>[] | undefined;
  actor: Actor | undefined;
}

export class Gate {
  readonly #wire: Pick<Wire<never>, "reader">;
  readonly #current = new AsyncLocalStorage<Actor>();
  readonly #lines = new WeakMap<Socket, Line>();
  readonly #original: Write;
  /** Called whenever something has changed. */
  changed: () => void = () => {};
  answered: (step: Step) => void = () => {};

  readonly #patched: Write;

  constructor(wire: Pick<Wire<never>, "reader">) {
    this.#wire = wire;
    const original = Socket.prototype.write as unknown as Write;
    this.#original = original;
    const writes = this.#writes.bind(this);
    this.#patched = function (this: Socket, ...args: Parameters<Write>) {
      return writes(this, args) ? true : original.apply(this, args);
    };
  }

  open(): void {
    (Socket.prototype as { write: unknown }).write = this.#patched;
  }

  close(): void {
    (Socket.prototype as { write: unknown }).write = this.#original;
  }

  run<T>(actor: Actor, work: () => Promise<T>): Promise<T> {
    return this.#current.run(actor, work);
  }

  /** Whether it is held back. */
  #writes(socket: Socket, args: Parameters<Write>): boolean {
    const known = this.#lines.get(socket);
    if (known?.held) {
      known.held.push(args);
      return this.#more(known, args);
    }
    const actor = this.#current.getStore();
    const line = known ?? (actor ? this.#line(socket) : undefined);
    if (!line) return false;
    const text = line.reader.sent(bytes(args));
    if (text === undefined || !actor || actor.state === "done") return false;
    line.held = [args];
    line.actor = actor;
    const place = sites.here(this.#patched).place;
    actor.step = { actor: actor.index, text, place, rows: [], error: undefined, waitedFor: new Set() };
    actor.line = line;
    actor.state = "gated";
    this.changed();
    return true;
  }

  /** A statement may come in several pieces. */
  #more(line: Line, args: Parameters<Write>): true {
    const text = line.reader.sent(bytes(args));
    const step = line.actor?.step;
    if (text && step) (step as { text: string }).text = step.text ? `${step.text}; ${text}` : text;
    return true;
  }

  #line(socket: Socket): Line {
    const line: Line = { socket, reader: this.#wire.reader(), held: undefined, actor: undefined };
    this.#lines.set(socket, line);
    socket.prependListener("data", (chunk: Buffer) => this.#hears(line, chunk));
    return line;
  }

  #hears(line: Line, chunk: Buffer): void {
    const { ready, rows, error } = line.reader.received(chunk);
    const { actor } = line;
    const step = actor?.step;
    if (!actor || !step || actor.line !== line || actor.state !== "sent") return;
    step.rows.push(...rows);
    step.error ??= error;
    if (!ready) return;
    actor.state = "running";
    actor.blocked = false;
    actor.step = undefined;
    line.actor = undefined;
    this.answered(step);
    this.changed();
  }

  /** Lets an actor's statement go. */
  release(actor: Actor): Step {
    const { line, step } = actor;
    if (!line?.held || !step) throw new Error(`${actor.name} has nothing to send`);
    const { held } = line;
    line.held = undefined;
    actor.state = "sent";
    for (const args of held) this.#original.apply(line.socket, args);
    return step;
  }

  port(actor: Actor): number | undefined {
    return actor.line?.socket.localPort;
  }
}

function bytes([chunk, encoding]: Parameters<Write>): Uint8Array {
  return typeof chunk === "string"
    ? Buffer.from(chunk, typeof encoding === "string" ? (encoding as BufferEncoding) : "utf8")
    : chunk;
}
