/**
 * Actors of this process, held back at the socket, so that it does not matter which driver or ORM they use; an
 * AsyncLocalStorage tells whose statement it is.
 */
import { setTimeout as sleep } from "node:timers/promises";
import type { Socket } from "node:net";
import type { Isolation } from "../../seam/database.ts";
import { callSites } from "../../context/call-site.ts";
import {
  type OurSessions,
  type Protocol,
  type WrittenTables,
  noSession,
} from "../../seam/protocol-reader.ts";
import { Actor, type ActorStage, type ActorStep, type ActorWait, step } from "./actor.ts";
import { type After, Around } from "./around.ts";
import {
  type Listener,
  type Pass,
  type Write,
  bytes,
  current,
  isConnection,
  listen,
  stopListening,
} from "./listen.ts";
import { awaits, present } from "./awaits.ts";
import { Requests } from "./requests.ts";
import { resetOf, settingsOf } from "./session-settings.ts";
import type { SeenTables } from "./seen-tables.ts";
import { type HeldBytes, type SentStep, SocketLine, clearMs } from "./socket-line.ts";
import { footprint, locksRows, twoPhase } from "./statement.ts";
import { type Alone, alone, hasOthersWithin, nothing, together, writtenBy } from "./written.ts";

/** A server, and a connection to it for questions. */
export interface Server {
  readonly protocol: Omit<Protocol<never>, "waiting" | "describe" | "cancel" | "related" | "keep" | "settle">;
  /** Functions that may write. */
  readonly writers: ReadonlySet<string>;
  readonly tables: SeenTables;
  /** Of these sessions, those that wait, and for which. */
  waiting(sessions: readonly string[]): Promise<ReadonlyMap<string, readonly string[]>>;
  describe(sessions: readonly string[]): Promise<readonly string[]>;
  cancel(sessions: readonly string[]): Promise<void>;
  marked(name: string): Promise<string | undefined>;
  /** Absent: locks depend on nothing but what is committed. */
  settle?(): Promise<boolean>;
  /** Absent: there are no leases. */
  expire?(): Promise<void>;
}

/** Whose connections are they: an application's in another process. */
export interface Relayed {
  has(socket: Socket): boolean;
}

/** An actor in another process may take so long to do something, beside those that could go on. */
const remoteNapMs = 1000;
/** So long the answer of one is kept back while another one, in another process, does something. */
const keptBackMs = 3000;

/** For what a process that has ended still tries: it is in nobody's way then. */
const deadMs = 300;

export class Sockets implements ActorStage, Listener {
  readonly #server: Server;
  readonly #protocol: Server["protocol"];
  readonly #work: readonly (() => Promise<unknown>)[];
  readonly #lines = new Map<Socket, SocketLine>();
  /** When all that an actor does is over. */
  readonly #ends = new WeakMap<Actor, Promise<void>>();
  #made = 0;
  /** Of this run, those first that have heard nothing for the longest time. */
  #actors: Actor[] = [];
  /** Whose client is hearing an answer at this moment. */
  #passing: SocketLine | undefined;
  /** Its answer is to be lost. */
  #lost: ActorStep | undefined;
  #waits: { readonly step: ActorStep; readonly work: () => void } | undefined;
  readonly #awaits = awaits();
  /** For what is no actor's. */
  readonly #aside = new Actor(-1, "");
  /** For the invariant. */
  readonly #judge = new Actor(-1, "");
  /** Of this process, whatever they are used for. */
  readonly #sockets = new Set<Socket>();
  /** Statements of actors and of the invariant, which are looked at when somebody asks; they grow until then. */
  #sent: { readonly text: string }[] = [];
  #written = nothing;
  /** Actors that were called, and those of which a statement was seen. */
  readonly #called = new Set<number>();
  readonly #heard = new Set<number>();
  #open = false;
  #victim: number | undefined;
  /** Whose the sessions are in this run. */
  readonly #users = new Map<string, Actor>();
  /** Whose transactions were prepared in this run, and are not over. */
  readonly #prepared = new Map<string, Actor>();
  readonly #requests: Requests<Actor>;
  readonly #around: Around;
  readonly #relayed: Relayed | undefined;
  /** Who was let go last. */
  #last: Actor | undefined;
  readonly unseen = new Set<string>();
  readonly guessed = new Set<string>();
  readonly victims: boolean;
  certified = false;
  get learned(): number {
    return this.#server.tables.learned;
  }
  /** Of the actors' transactions; undefined: as they come. */
  level: Isolation | undefined;
  changed: () => void = () => {};

  /** `relayed`: of a proxy, where an application in another process is held back. */
  constructor(server: Server, work: readonly (() => Promise<unknown>)[], relayed?: Relayed) {
    this.#server = server;
    this.#relayed = relayed;
    this.#protocol = server.protocol;
    this.victims = server.protocol.patience !== undefined;
    this.#work = work;
    this.#aside.over = this.#judge.over = true;
    this.#around = new Around({
      protocol: server.protocol,
      unseen: this.unseen,
      marked: (name) => this.aside(() => server.marked(name)),
      deliver: (line, after) => this.#deliver(line, after),
      changed: () => this.changed(),
    });
    // From here on, so that what is prepared before the first run is known by its text.
    listen(this);
    this.#requests = new Requests(current, present, (port) => {
      for (const { socket, user } of this.#lines.values())
        if (socket.localPort === port) return present(user);
      return undefined;
    });
  }

  open(victim: number | undefined): void {
    this.#open = true;
    this.#victim = victim;
    this.#waits = this.#lost = this.#last = undefined;
    this.#actors = [];
    this.#users.clear();
    this.#prepared.clear();
    for (const line of this.#lines.values()) line.user = line.told = undefined;
    this.#awaits.enable();
  }

  /** What is still held back goes out. */
  close(): void {
    this.#open = false;
    this.#awaits.disable();
    for (const line of this.#lines.values()) {
      line.letGo();
      if (line.around && !line.sent) void this.#around.commit(line);
    }
  }

  /** What waits is ended, and what an actor has left open is rolled back: its client learns of it when it goes on. */
  async clear(actors: readonly Actor[]): Promise<void> {
    const until = performance.now() + clearMs;
    const used = [...this.#lines.values()].filter(({ told, user }) => told ?? user);
    const busy = () => used.filter((line) => line.busy);
    // Who is let go may come to wait for the same.
    while (performance.now() < until && (busy().length > 0 || actors.some(({ result }) => !result))) {
      const sessions = busy().flatMap(({ session }) => session ?? []);
      await this.aside(() => this.#server.cancel(sessions)).catch(() => {});
      await sleep(20);
    }
    for (const line of used) {
      const { around } = line;
      line.around = undefined;
      if (around && around.heard.length > 0) around.pass?.(Buffer.concat(around.heard));
    }
    for (const line of used)
      if (!busy().includes(line) && line.reader.inside && !line.socket.destroyed)
        await line.tell(this.#protocol.autocommit.rollback);
  }

  describe(sessions: readonly string[]): Promise<readonly string[]> {
    return this.aside(() => this.#server.describe(sessions));
  }

  /** Leaves the connections as they were. */
  async end(): Promise<void> {
    await Promise.all(
      [...this.#lines.values()].map(async (line) => {
        if (line.settings !== "" && line.quiet)
          for (const text of resetOf(this.#protocol, this.level)) await line.tell(text);
      }),
    );
    this.#lines.clear();
    this.#requests.end();
    stopListening();
  }

  /** The same for what counts as the actors' doing, when it is to be undone. */
  judge<T>(work: () => Promise<T>): Promise<T> {
    return current.run(this.#judge, async () => work());
  }

  /** By actors and the invariant, so far. */
  get written(): WrittenTables {
    this.#written = together([this.#written, writtenBy(this.#sent.map(({ text }) => text))]);
    this.#sent = [];
    // Somebody may have written where nobody reads along.
    return [...this.#called].some((actor) => !this.#heard.has(actor))
      ? { ...this.#written, anything: true }
      : this.#written;
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
    return current.run(this.#aside, async () => work());
  }

  get remote(): boolean {
    return this.#relayed !== undefined;
  }

  /** What is in this thread has. */
  async caughtUp(): Promise<void> {
    const waiting = this.#actors.length < this.#work.length || this.#actors.some(({ next }) => next);
    if (this.remote && waiting) await sleep(remoteNapMs);
  }

  start(actor: Actor): void {
    this.#last = actor;
    this.#actors.push(actor);
    this.#called.add(actor.index);
    const end = (result: PromiseSettledResult<unknown>) => {
      if (actor.crashed) return;
      actor.result = result;
      actor.asleep = false;
      this.changed();
    };
    const ended = current
      .run(actor, async () => (this.#work[actor.index] as () => Promise<unknown>)())
      .then(
        (value) => end({ status: "fulfilled", value }),
        (reason: unknown) => end({ status: "rejected", reason }),
      );
    this.#ends.set(actor, ended);
  }

  async waiting(steps: readonly ActorStep[]): Promise<ReadonlyMap<ActorStep, ActorWait>> {
    const lines = [...this.#lines.values()].filter(({ socket }) => !socket.destroyed);
    const sessionOf = (of: ActorStep) => lines.find(({ sent }) => sent?.step === of)?.session;
    const found = await this.aside(() =>
      this.#server.waiting(steps.flatMap((each) => sessionOf(each) ?? [])),
    );
    return new Map(
      steps.flatMap((each) => {
        const others = found.get(sessionOf(each) ?? "") ?? [];
        if (others.length === 0) return [];
        const usersOf = (session: string) =>
          session === noSession ? [...this.#prepared.values()] : [this.#users.get(session) ?? []].flat();
        const actors = new Set(others.flatMap((session) => usersOf(session).map(({ index }) => index)));
        const outside = others.filter((session) => usersOf(session).length === 0);
        return [[each, { actors: [...actors], outside }] as const];
      }),
    );
  }

  /** Whether it is kept back. */
  writes(socket: Socket, args: Parameters<Write>): boolean {
    if (socket.remotePort !== undefined) this.#sockets.add(socket);
    const known = this.#lines.get(socket);
    if (known?.keeps(args)) return true;
    const relayed = this.#relayed?.has(socket) ?? false;
    const said = current.getStore();
    const line = known ?? (relayed || (said && isConnection(socket)) ? this.#line(socket) : undefined);
    if (!line) return false;
    const goesOn = line.sent !== undefined && line.reader.open;
    const { unanswered } = line.reader;
    const { inside } = line.reader;
    const text = line.reader.sent(bytes(args));
    const here = relayed && text !== undefined && !goesOn ? this.#whose(line, inside, text) : said;
    if (line.sent && goesOn) {
      line.sent.step.text = line.reader.text?.() ?? line.sent.step.text;
      line.sent.actor.sent.add(line.sent.step);
      return false;
    }
    // What is sent in nobody's name on a connection of theirs was queued there by them.
    const theirs = here ? here !== this.#aside : line.theirs;
    line.theirs ||= theirs;
    const last = here === this.#aside ? here : (present(here) ?? present(line.user));
    const actor = this.#passing === line && last && last === line.user ? (this.#behind(line) ?? last) : last;
    // What passes is a part of something that is to come.
    if (actor && !actor.over && this.#open) line.user = actor;
    if (text === undefined || !actor || actor.over || !this.#open) {
      // Of a long one, the last piece has all of it.
      if (theirs && text) this.#sent.push({ text });
      return false;
    }
    this.#hold(line, actor, args, text, line.reader.unanswered - unanswered);
    return true;
  }

  /**
   * Whose it is what an application in another process sends: its who has the transaction, else its who was let go. One is let go
   * at a time: see `#keepsBack`.
   */
  #whose(line: SocketLine, inside: boolean | undefined, text: string): Actor | undefined {
    const user = present(line.user);
    if (user && (inside || line.sent || line.around)) return user;
    const going = this.#actors.filter(({ over, result }) => !over && !result);
    const running = going.filter(runs);
    const [one] = running;
    if (one && running.length === 1) return one;
    // Something that goes on after its answer, or beside it: a second connection, a task of the application's own.
    if (going.length > 0 && this.#open) this.guessed.add(text);
    return [user, this.#last, one].find((each) => each && going.includes(each));
  }

  /** Two that are let go at once, by a COMMIT for which one of them has waited, could not be told apart. */
  #keepsBack(line: SocketLine): boolean {
    const asked = line.sent?.actor;
    if (!asked || asked.over || !this.#open || !this.#relayed?.has(line.socket)) return false;
    return this.#actors.some((actor) => actor !== asked && !actor.over && !actor.result && runs(actor));
  }

  async #hearLater(line: SocketLine): Promise<void> {
    const until = performance.now() + keptBackMs;
    while (this.#keepsBack(line) && performance.now() < until) await sleep(1);
    const all = line.later ?? [];
    line.later = undefined;
    for (const hear of all) hear();
  }

  /**
   * What a client sends in the same breath in which it hears an answer was queued behind that one: by whoever of the others has
   * sent nothing, and has no connection of its own: the one that waits for the longest time.
   */
  #behind(line: SocketLine): Actor | undefined {
    const lines = [...this.#lines.values()];
    return this.#actors.find(
      (actor) =>
        actor !== line.user &&
        !actor.over &&
        actor.result === undefined &&
        actor.held.length === 0 &&
        actor.sent.size === 0 &&
        !lines.some((other) => other !== line && other.user === actor),
    );
  }

  #hold(line: SocketLine, actor: Actor, args: Parameters<Write>, text: string, requests: number): void {
    const here = callSites.here(this.writes);
    const trail = [...actor.trail];
    // In another process, nobody knows.
    const place = this.#relayed?.has(line.socket)
      ? undefined
      : () => here.place ?? trail.findLast((site) => site.place)?.place;
    const held: HeldBytes = {
      step: step(actor.index, text, place, { connection: line.id, own: actor.own }),
      actor,
      writes: [args],
      requests,
    };
    line.held = held;
    this.#heard.add(actor.index);
    this.#sent.push(held.step);
    actor.asleep = false;
    let kind: { readonly of: string; readonly is: Alone } | undefined;
    const kindOf = (): Alone => {
      const { text: of } = held.step;
      const { together: whole } = this.#protocol.autocommit;
      if (kind?.of !== of) kind = { of, is: alone(of, { whole, ...this.#server }) };
      return kind.is;
    };
    const ready = () => {
      actor.held.push({
        step: held.step,
        ready: () => {
          if (line.sent || line.around) return false;
          const is = line.reader.inside === false && held.requests <= 1 ? kindOf() : undefined;
          held.step.inside = line.reader.inside === true;
          held.step.opens = is !== undefined && is.fits && is.writes;
          return true;
        },
        send: async () => {
          line.sent = { step: held.step, actor };
          if (this.#protocol.certifies && /\bserializable\b/i.test(held.step.text)) this.certified = true;
          this.#server.tables.saw(held.step.text);
          held.step.acts = hasOthersWithin(held.step.text, this.#server);
          if (held.step.acts) this.unseen.add(held.step.text);
          await this.#prepare(line, actor);
          if (line.reader.inside === false) await this.#around.begin(line, held, kindOf(), this.level);
          if (line.session !== undefined) this.#users.set(line.session, actor);
          line.letGo();
        },
      });
      this.changed();
    };
    const { unknown } = line.reader;
    if (line.sent || line.around || (unknown === undefined && line.self)) ready();
    else void this.#learn(line, held.step, unknown).then(ready);
  }

  /** What the client was to hear, as it would have heard it. */
  #deliver(line: SocketLine, after: After): void {
    const { around } = line;
    const asked = line.sent?.step;
    if (asked && asked === this.#lost) return void this.#lose(line);
    line.around = undefined;
    line.reader.inside = after.inside;
    this.#answered(line);
    const answer = around && this.#protocol.autocommit.answer(Buffer.concat(around.heard), after);
    const pass = () => answer && around.pass?.(answer);
    const user = present(line.user);
    this.#passing = line;
    if (user) current.run(user, pass);
    else pass();
    this.#passing = undefined;
    if (asked) this.#heardOf(asked);
  }

  /** A connection goes from one actor to the next, outside of any transaction: here it may be told something. */
  async #prepare(line: SocketLine, actor: Actor): Promise<void> {
    line.user = actor;
    await this.#identify(line);
    if (line.told === actor) return;
    line.told = actor;
    // Behind a pooler another one would have it in the end.
    if (line.self?.direct === false) return;
    const texts = settingsOf(this.#protocol, this.level, this.#victim, actor.index);
    const settings = texts.join("; ");
    if (settings === line.settings) return;
    line.settings = settings;
    for (const text of texts) await line.tell(text);
  }

  async #identify(line: SocketLine): Promise<void> {
    if (line.self) return;
    const self = await line.identify();
    if (self?.serializable) this.certified = true;
  }

  async #learn(line: SocketLine, held: ActorStep, unknown: string | undefined): Promise<void> {
    await this.#identify(line);
    if (unknown !== undefined) await line.learn(held, unknown);
  }

  #line(socket: Socket): SocketLine {
    const line = new SocketLine(this.#made++, socket, this.#protocol);
    this.#lines.set(socket, line);
    return line;
  }

  hears(socket: Socket, event: string | symbol, rest: unknown[], pass: Pass): boolean {
    const line = this.#lines.get(socket) ?? this.#line(socket);
    if (line.later || this.#keepsBack(line)) {
      if (!line.later) void this.#hearLater(line);
      (line.later ??= []).push(() => this.#hear(line, event, rest, pass));
      return true;
    }
    return this.#hear(line, event, rest, pass);
  }

  #hear(line: SocketLine, event: string | symbol, rest: unknown[], pass: Pass): boolean {
    const asked = line.sent?.step;
    if (event === "data" && this.#hears(line, rest[0] as Buffer, pass)) return true;
    if (event === "close") this.#gone(line);
    // Clients send what they have queued when an answer arrives, in the context in which the connection was opened.
    const user = event === "data" ? present(line.user) : undefined;
    this.#passing = line;
    const heard = user ? current.run(user, () => pass()) : pass();
    this.#passing = undefined;
    if (asked && line.sent?.step !== asked) this.#heardOf(asked);
    return heard;
  }

  get settle(): (() => Promise<boolean>) | undefined {
    const { settle } = this.#server;
    return settle && (() => this.aside(settle));
  }

  lose(step: ActorStep): void {
    this.#lost = step;
  }

  async expire(): Promise<void> {
    await this.aside(async () => this.#server.expire?.());
  }

  async crash(actor: Actor): Promise<void> {
    actor.crashed = actor.over = true;
    actor.result = { status: "rejected", reason: new Error("its process has ended") };
    actor.held.length = 0;
    actor.sent.clear();
    const own = [...this.#lines.values()].filter(({ user }) => user === actor);
    const sessions = own.flatMap(({ session }) => session ?? []);
    for (const line of own) {
      line.held = line.sent = line.around = undefined;
      line.socket.destroy();
    }
    // What they had locked is locked until the server has noticed.
    const until = performance.now() + clearMs;
    while (performance.now() < until && (await this.describe(sessions)).length > 0) await sleep(5);
    for (const session of sessions) this.#users.delete(session);
    // What is left of it finds nobody to talk to, and gives up.
    await Promise.race([this.#ends.get(actor), sleep(deadMs, undefined, { ref: false })]);
  }

  async unlock(): Promise<void> {
    for (const line of this.#lines.values())
      if (line.theirs && line.quiet) await line.tell(this.#protocol.unlock);
  }

  answered(to: ActorStep, work: () => void): void {
    this.#waits = { step: to, work };
  }

  #heardOf(asked: ActorStep): void {
    const { step: to, work } = this.#waits ?? {};
    if (to !== asked) return;
    this.#waits = undefined;
    work?.();
  }

  /** Whether the client is not to hear it now. */
  #hears(line: SocketLine, chunk: Buffer, pass: Pass): boolean {
    if (line.tells(chunk)) return true;
    const { sent, around } = line;
    const answer = line.reader.received(chunk);
    if (!sent) {
      // Somebody is about to have a connection.
      this.changed();
      return false;
    }
    sent.step.rows.push(...answer.rows);
    sent.step.error ??= answer.error;
    sent.step.deadlock ||= answer.deadlock ?? false;
    sent.step.affected = answer.affected ?? sent.step.affected;
    const phase = answer.ready && sent.step.error === undefined ? twoPhase(sent.step.text) : undefined;
    if (phase?.prepares) this.#prepared.set(phase.name, sent.actor);
    else if (phase) this.#prepared.delete(phase.name);
    if (answer.ready) sent.step.ends = sent.step.inside && line.reader.inside === false;
    if (answer.ready && sent.step === this.#lost && !around) return this.#lose(line);
    // Before the client has sent the rest of its statement it has to hear what that depends on.
    if (around && !line.reader.open) {
      around.heard.push(chunk);
      around.pass = pass;
      if (answer.ready) this.#around.heard(line, sent);
      return true;
    }
    if (answer.ready) this.#answered(line);
    else if (answer.paused) this.#paused(sent);
    return false;
  }

  /** Its actor may do something else before it reads on. What is read then cannot be held back. */
  #paused({ step: asked, actor }: SentStep): void {
    asked.blocked = false;
    actor.sent.delete(asked);
    actor.asleep = false;
    if (locksRows(asked.text) || footprint(asked.text).any) this.unseen.add(asked.text);
    this.changed();
  }

  #lose(line: SocketLine): true {
    this.#lost = undefined;
    line.around = undefined;
    this.#answered(line);
    line.socket.destroy();
    return true;
  }

  #answered(line: SocketLine): void {
    const { sent } = line;
    if (!sent) return;
    line.sent = undefined;
    sent.step.blocked = false;
    sent.actor.sent.delete(sent.step);
    sent.actor.asleep = false;
    this.#last = sent.actor;
    this.#actors = [...this.#actors.filter((actor) => actor !== sent.actor), sent.actor];
    this.changed();
  }

  #gone(line: SocketLine): void {
    if (line.sent) line.sent.step.error ??= "the connection was closed";
    const { held } = line;
    line.held = line.around = undefined;
    if (held) {
      const at = held.actor.held.findIndex((each) => each.step === held.step);
      if (at >= 0) held.actor.held.splice(at, 1);
    }
    this.#answered(line);
    this.#lines.delete(line.socket);
    this.changed();
  }
}

/** It has heard everything, and is about to do something. */
const runs = ({ asleep, held, sent }: Actor) => !asleep && held.length === 0 && sent.size === 0;
