/**
 * Actors of this process, held back at the socket, so that it does not matter which driver or ORM they use; an
 * AsyncLocalStorage tells whose statement it is.
 */
import { setImmediate as turn } from "node:timers/promises";
import { type AsyncHook, AsyncLocalStorage, createHook } from "node:async_hooks";
import type { Socket } from "node:net";
import type { Isolation } from "../../core/database.ts";
import { sites } from "../../core/site.ts";
import type { Answer, OurSessions, Wire, WireReader, Written } from "../../core/wire.ts";
import { Actor, type Stage, type Step, step } from "./actor.ts";
import { type Listener, type Write, bytes, listen, readerOf, send, stopListening } from "./listen.ts";
import { nothing, together, writtenBy } from "./written.ts";

type Protocol = Omit<Wire<never>, "waiting" | "related" | "keep">;
/** Of the sessions of these ports, those that wait, and for which. */
type Ask = (ports: readonly number[]) => Promise<ReadonlyMap<number, readonly number[]>>;

/** One connection to the server. */
interface Line {
  /** To tell it from the others. */
  readonly id: number;
  readonly socket: Socket;
  readonly reader: WireReader;
  /** What was kept back, as it is to be written. */
  held: { readonly step: Step; readonly actor: Actor; readonly writes: Parameters<Write>[] } | undefined;
  /** Sent, and not answered. */
  sent: { readonly step: Step; readonly actor: Actor } | undefined;
  /** Who used it last in this run. */
  user: Actor | undefined;
  /** For whom its session was told what it was told. */
  told: Actor | undefined;
  /** What the session was told of ours. */
  settings: string;
  /** An actor or the invariant has used it at all. */
  theirs: boolean;
  /** Waits for the answer to a statement of ours, which the client does not see. */
  ours: { readonly reader: WireReader; readonly rows: Answer["rows"][number][]; done(): void } | undefined;
}

/** Frames between an await and the code that it stands in. */
const nearby = 8;
/** Promises that a client makes for one statement; Prisma makes 200. */
const longest = 1000;

/**
 * A session that looks for deadlocks first is the one that is ended. It looks once: if it was too early, another is ended,
 * and the run is tried again.
 */
const patience = { usual: 40, victim: 150, other: 2000 };

export class Sockets implements Stage, Listener {
  readonly #wire: Protocol;
  readonly #ask: Ask;
  readonly #work: readonly (() => Promise<unknown>)[];
  readonly #current = new AsyncLocalStorage<Actor>();
  readonly #lines = new Map<Socket, Line>();
  #made = 0;
  /**
   * Where an actor's own code last awaited something: clients that send a statement only when they are awaited have
   * none of it on their stack.
   */
  readonly #awaits: AsyncHook;
  /** For what is no actor's. */
  readonly #aside = new Actor(-1, "");
  /** For the invariant. */
  readonly #judge = new Actor(-1, "");
  /** Of this process, whatever they are used for. */
  readonly #sockets = new Set<Socket>();
  /** Statements of actors and of the invariant, which are looked at when somebody asks; they grow until then. */
  #sent: { readonly text: string }[] = [];
  #written = nothing;
  #open = false;
  #victim: number | undefined;
  /** Of the actors' transactions; undefined: as they come. */
  level: Isolation | undefined;
  changed: () => void = () => {};

  constructor(wire: Protocol, ask: Ask, work: readonly (() => Promise<unknown>)[]) {
    this.#wire = wire;
    this.#ask = ask;
    this.#work = work;
    this.#aside.over = this.#judge.over = true;
    const init = (_: number, type: string) => {
      const actor = type === "PROMISE" ? present(this.#current.getStore()) : undefined;
      if (actor && actor.trail.push(sites.here(init, nearby)) > longest) actor.trail.splice(0, longest / 2);
    };
    this.#awaits = createHook({ init });
    // From here on, so that what is prepared before the first run is known by its text.
    listen(this);
  }

  open(victim: number | undefined): void {
    this.#open = true;
    this.#victim = victim;
    for (const line of this.#lines.values()) line.user = line.told = undefined;
    this.#awaits.enable();
  }

  /** What is still held back goes out. */
  close(): void {
    this.#open = false;
    this.#awaits.disable();
    for (const line of this.#lines.values()) this.#letGo(line);
  }

  /** Leaves the connections as they were. */
  async end(): Promise<void> {
    await Promise.all(
      [...this.#lines.values()].map(async (line) => {
        if (line.settings !== "" && !line.sent)
          for (const text of this.#reset()) await this.#tell(line, text);
      }),
    );
    this.#lines.clear();
    stopListening();
  }

  /** The same for what counts as the actors' doing, when it is to be undone. */
  judge<T>(work: () => Promise<T>): Promise<T> {
    return this.#current.run(this.#judge, async () => work());
  }

  /** By actors and the invariant, so far. */
  get written(): Written {
    this.#written = together([this.#written, writtenBy(this.#sent.map(({ text }) => text))]);
    this.#sent = [];
    return this.#written;
  }

  get sessions(): OurSessions {
    const ports = new Set<number>();
    for (const socket of this.#sockets) {
      if (socket.localPort === undefined || socket.destroyed) this.#sockets.delete(socket);
      else ports.add(socket.localPort);
    }
    return { ports };
  }

  /** Not held back; what it sends is seen. */
  aside<T>(work: () => Promise<T>): Promise<T> {
    return this.#current.run(this.#aside, async () => work());
  }

  start(actor: Actor): void {
    const end = (result: PromiseSettledResult<unknown>) => {
      actor.result = result;
      actor.asleep = false;
      this.changed();
    };
    this.#current
      .run(actor, async () => (this.#work[actor.index] as () => Promise<unknown>)())
      .then(
        (value) => end({ status: "fulfilled", value }),
        (reason: unknown) => end({ status: "rejected", reason }),
      );
  }

  async waiting(steps: readonly Step[]): Promise<ReadonlyMap<Step, readonly number[]>> {
    const lines = [...this.#lines.values()].filter(({ socket }) => !socket.destroyed);
    const portOf = (of: Step) => lines.find(({ sent }) => sent?.step === of)?.socket.localPort;
    const ports = steps.flatMap((each) => portOf(each) ?? []);
    const found = await this.aside(() => this.#ask(ports));
    const actorOf = (port: number) => lines.find(({ socket }) => socket.localPort === port)?.user?.index;
    return new Map(
      steps.flatMap((each) => {
        const others = (found.get(portOf(each) ?? -1) ?? []).flatMap((port) => actorOf(port) ?? []);
        const distinct = [...new Set(others)].filter((other) => other !== each.actor);
        return distinct.length > 0 ? [[each, distinct] as const] : [];
      }),
    );
  }

  /** Whether it is kept back. */
  writes(socket: Socket, args: Parameters<Write>): boolean {
    if (socket.remotePort !== undefined) this.#sockets.add(socket);
    const known = this.#lines.get(socket);
    if (known?.held) {
      const more = known.reader.sent(bytes(args));
      const { step: waiting, writes } = known.held;
      writes.push(args);
      const all = known.reader.text?.();
      if (all) waiting.text = all;
      else if (more) waiting.text += waiting.text ? `; ${more}` : more;
      return true;
    }
    const here = this.#current.getStore();
    // Terminals and pipes are sockets too.
    const line = known ?? (here && socket.remotePort !== undefined ? this.#line(socket) : undefined);
    if (!line) return false;
    const goesOn = line.sent !== undefined && line.reader.open;
    const text = line.reader.sent(bytes(args));
    if (line.sent && goesOn) {
      line.sent.step.text = line.reader.text?.() ?? line.sent.step.text;
      return false;
    }
    // What is sent in nobody's name on a connection of theirs was queued there by them.
    const theirs = here ? here !== this.#aside : line.theirs;
    line.theirs ||= theirs;
    const actor = here === this.#aside ? here : (present(here) ?? present(line.user));
    // What passes is a part of something that is to come.
    if (actor && !actor.over && this.#open) line.user = actor;
    if (text === undefined || !actor || actor.over || !this.#open) {
      // Of a long one, the last piece has all of it.
      if (theirs && text) this.#sent.push({ text });
      return false;
    }
    this.#hold(line, actor, args, text);
    return true;
  }

  #hold(line: Line, actor: Actor, args: Parameters<Write>, text: string): void {
    const here = sites.here(this.writes);
    const trail = [...actor.trail];
    const place = () => here.place ?? trail.findLast((site) => site.place)?.place;
    const held = { step: step(actor.index, text, place, line.id), actor, writes: [args] };
    line.held = held;
    this.#sent.push(held.step);
    actor.asleep = false;
    const ready = () => {
      actor.held.push({
        step: held.step,
        ready: () => line.sent === undefined,
        send: async () => {
          line.sent = { step: held.step, actor };
          await this.#prepare(line, actor);
          this.#letGo(line);
        },
      });
      this.changed();
    };
    const { unknown } = line.reader;
    if (unknown === undefined || line.sent) ready();
    else void this.#learn(line, held.step, unknown).then(ready);
  }

  async #learn(line: Line, held: Step, unknown: string): Promise<void> {
    line.reader.learn?.(await this.#tell(line, unknown));
    held.text = line.reader.text?.() ?? held.text;
  }

  #letGo(line: Line): void {
    const writes = line.held?.writes ?? [];
    line.held = undefined;
    for (const args of writes) send(line.socket, ...args);
  }

  /** A connection goes from one actor to the next, outside of any transaction: here it may be told something. */
  async #prepare(line: Line, actor: Actor): Promise<void> {
    line.user = actor;
    if (line.told === actor) return;
    line.told = actor;
    const texts = this.#settings(actor);
    const settings = texts.join("; ");
    if (settings === line.settings) return;
    line.settings = settings;
    // What passed before it has its own answer.
    while (line.reader.busy && !line.socket.destroyed) await turn();
    for (const text of texts) await this.#tell(line, text);
  }

  #settings(actor: Actor): string[] {
    const kind = this.#victim === undefined ? "usual" : this.#victim === actor.index ? "victim" : "other";
    const texts = this.level === undefined ? [] : [this.#wire.isolation(this.level)];
    if (this.#wire.patience) texts.push(this.#wire.patience(patience[kind]));
    return texts;
  }

  #reset(): string[] {
    const texts = this.level === undefined ? [] : [this.#wire.isolation(undefined)];
    if (this.#wire.patience) texts.push(this.#wire.patience(undefined));
    return texts;
  }

  /** Errors do not matter: a session without the right to be told that behaves as it did. */
  async #tell(line: Line, text: string): Promise<Answer["rows"]> {
    // The pool may be about to close it.
    if (!line.socket.writable) return [];
    const { promise, resolve } = Promise.withResolvers<void>();
    // Its own, since the other one may be in the middle of a statement that is held back.
    const reader = this.#wire.reader();
    const rows: Answer["rows"][number][] = [];
    const message = line.reader.statement?.(text) ?? this.#wire.statement(text);
    reader.sent(message);
    line.socket.once("close", resolve);
    line.ours = { reader, rows, done: resolve };
    send(line.socket, message);
    await promise;
    line.socket.off("close", resolve);
    return rows;
  }

  #line(socket: Socket): Line {
    const line: Line = {
      id: this.#made++,
      socket,
      reader: readerOf(socket, () => this.#wire.reader()),
      held: undefined,
      sent: undefined,
      user: undefined,
      told: undefined,
      settings: "",
      theirs: false,
      ours: undefined,
    };
    this.#lines.set(socket, line);
    return line;
  }

  hears(socket: Socket, event: string | symbol, rest: unknown[], pass: () => boolean): boolean {
    const line = this.#lines.get(socket) ?? this.#line(socket);
    if (event === "data" && this.#hears(line, rest[0] as Buffer)) return true;
    if (event === "close") this.#gone(line);
    // Clients send what they have queued when an answer arrives, in the context in which the connection was opened.
    const user = event === "data" ? present(line.user) : undefined;
    return user ? this.#current.run(user, pass) : pass();
  }

  /** Whether it was an answer for us alone. */
  #hears(line: Line, chunk: Buffer): boolean {
    const { ours, sent } = line;
    if (ours) {
      const { rows, ready } = ours.reader.received(chunk);
      ours.rows.push(...rows);
      if (ready) {
        line.ours = undefined;
        ours.done();
      }
      return true;
    }
    const answer = line.reader.received(chunk);
    if (!sent) {
      // Somebody is about to have a connection.
      this.changed();
      return false;
    }
    sent.step.rows.push(...answer.rows);
    sent.step.error ??= answer.error;
    if (answer.ready) this.#answered(line);
    return false;
  }

  #answered(line: Line): void {
    const { sent } = line;
    if (!sent) return;
    line.sent = undefined;
    sent.step.blocked = false;
    sent.actor.sent.delete(sent.step);
    sent.actor.asleep = false;
    this.changed();
  }

  #gone(line: Line): void {
    if (line.sent) line.sent.step.error ??= "the connection was closed";
    const { held } = line;
    line.held = undefined;
    if (held) {
      const at = held.actor.held.findIndex((each) => each.step === held.step);
      if (at >= 0) held.actor.held.splice(at, 1);
    }
    this.#answered(line);
    this.#lines.delete(line.socket);
    this.changed();
  }
}

function present(actor: Actor | undefined): Actor | undefined {
  return actor?.over === false ? actor : undefined;
}
