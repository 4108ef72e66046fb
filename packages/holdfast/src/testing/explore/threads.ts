/**
 * Actors whose statements are synchronous calls: in one thread these cannot come in between each other, so that the
 * races of such applications are between processes. Here each actor has a thread of its own, with connections of its
 * own, which sleeps inside the call until it has the turn.
 */
import { existsSync, readdirSync } from "node:fs";
import { extname, isAbsolute } from "node:path";
import { pathToFileURL } from "node:url";
import { Worker } from "node:worker_threads";
import { UnsupportedError, UsageError, message } from "../../seam/errors.ts";
import { self } from "../../context/self.ts";
import { Actor, type ActorStage, type ActorStep, type ActorWait, step } from "./actor.ts";
import { type Asked, type Given, type Said, type Verdict, flag, flags, revived, verdict } from "./verdict.ts";

/** An actor in a thread of its own; see `inThread`. */
export class ThreadActor {
  readonly module: URL;
  readonly name: string;
  readonly args: readonly unknown[];

  constructor(module: URL, name: string, args: readonly unknown[]) {
    this.module = module;
    this.name = name;
    this.args = args;
  }
}

/**
 * The function that a module exports by this name, called with these values in a thread of its own: for databases that
 * are files, whose clients are synchronous (see docs/races.md). `module`: `new URL("./shop.ts", import.meta.url)`.
 */
export function inThread(module: URL | string, name: string, ...args: unknown[]): ThreadActor {
  try {
    return new ThreadActor(urlOf(module), name, structuredClone(args));
  } catch (error) {
    if (error instanceof UsageError) throw error;
    throw new UsageError(
      `inThread(…, "${name}"): a value cannot go to another thread: ${message(error)}. Give what the function needs to make it there.`,
    );
  }
}

function urlOf(module: URL | string): URL {
  if (module instanceof URL) return module;
  if (isAbsolute(module)) return pathToFileURL(module);
  if (URL.canParse(module)) return new URL(module);
  throw new UsageError(`inThread("${module}"): say where it is: new URL("${module}", import.meta.url)`);
}

const extension = extname(self ?? "");
const source = "holdfast-source";

/** Engines that can hold synchronous clients back have a file for it: the shared code knows none of them by name. */
function engines(): string[] {
  const folder = new URL("../../engines/", import.meta.url);
  if (!existsSync(folder)) return [];
  return readdirSync(folder)
    .map((name) => new URL(`${name}/statement-hook${extension}`, folder))
    .filter((url) => existsSync(url))
    .map(({ href }) => href);
}

/** What the thread runs: a text, since a library cannot name the caller's module in an import of its own. */
function program(module: URL): URL {
  if (!URL.canParse(import.meta.url))
    throw new UnsupportedError(
      "inThread: a thread needs the files of Holdfast, and here it is part of a bundle",
    );
  const hooked = engines();
  const lines = [
    `import { serve } from ${JSON.stringify(new URL(`./thread${extension}`, import.meta.url).href)};`,
    ...hooked.map((url, i) => `import { hookStatements as engine${i} } from ${JSON.stringify(url)};`),
    `await serve([${hooked.map((_, i) => `engine${i}`).join(", ")}], () => import(${JSON.stringify(module.href)}));`,
  ];
  return new URL(`data:text/javascript,${encodeURIComponent(lines.join("\n"))}`);
}

/** What this process was started with goes for its threads; from source they need to find the source. */
function options(): { execArgv?: string[] } {
  const condition = `--conditions=${source}`;
  return extension === ".ts" && !process.execArgv.includes(condition) ? { execArgv: [condition] } : {};
}

/** Who has a lock, if none of the actors is in a transaction. */
const elsewhere =
  "a connection that is in no thread of an actor: in another process, or one of the test's own that has a transaction open";

type End = (result: PromiseSettledResult<unknown>) => void;

class Thread {
  readonly name: string;
  readonly #worker: Worker;
  readonly #what: string;
  readonly #flags = new Int32Array(new SharedArrayBuffer(flags * Int32Array.BYTES_PER_ELEMENT));
  readonly ready = Promise.withResolvers<void>();
  /** Of the run that is under way. */
  actor: Actor | undefined;
  end: End = () => {};
  /** Called when it says anything. */
  heard: () => void = () => {};
  /** What it sent, and is not answered. */
  sent: ActorStep | undefined;
  /** It sleeps, since somebody else has the lock that it needs: how many of the others' statements it has seen. */
  locked: { readonly since: number; seen: number } | undefined;
  /** It sleeps, since it has not had the turn. */
  held = false;
  inside = false;
  /** Statements that were answered in this run. */
  answered = 0;
  /** Statements that were refused for a lock, and what of the others' had been answered then. */
  readonly refused = new Map<string, number>();
  /** A statement of its transaction was refused, after so many of the others': it begins anew when they have done something. */
  rests: number | undefined;
  /** Nobody could go on when the others had done so much: it was let try all the same. */
  insists: number | undefined;
  libraries: readonly string[] = [];
  clients: readonly string[] = [];
  /** With what its last run ended. */
  threw: Error | undefined;
  /** Why there is none any more. */
  gone: Error | undefined;

  constructor(name: string, { module, name: called, args }: ThreadActor, hears: (said: Said) => void) {
    this.name = name;
    const given: Given = { name: called, args, flags: this.#flags };
    this.#worker = new Worker(program(module), { workerData: given, ...options() });
    this.#worker.on("message", hears);
    this.#worker.on("error", (error) => this.fail(error));
    this.#worker.on("exit", (code) => this.fail(new Error(`it ended by itself, with code ${code}`)));
    this.#what = `${called} of ${module.href}`;
    // Whoever waits for it is told; until then nobody is.
    this.ready.promise.catch(() => {});
  }

  run(end: End): void {
    this.end = end;
    if (this.gone) end({ status: "rejected", reason: this.gone });
    else this.#ask("run");
  }

  /** When it says anything. */
  async idle(): Promise<void> {
    if (this.gone || this.held || this.locked) return;
    const { promise, resolve } = Promise.withResolvers<void>();
    this.heard = resolve;
    this.#ask("idle?");
    await promise;
  }

  #ask(asked: Asked): void {
    // oxlint-disable-next-line unicorn/require-post-message-target-origin -- it is a thread's port, not a window's.
    this.#worker.postMessage(asked);
  }

  hold(holding: boolean): void {
    Atomics.store(this.#flags, flag.holding, holding ? 1 : 0);
  }

  /** Wakes it. */
  tell(which: Verdict): void {
    this.held = false;
    Atomics.store(this.#flags, flag.verdict, which);
    Atomics.notify(this.#flags, flag.verdict);
  }

  /** It cannot be used, from now on. */
  fail(error: unknown): void {
    this.gone ??= new Error(`explore: the thread of ${this.name} (${this.#what}): ${message(error)}`, {
      cause: error,
    });
    this.ready.reject(this.gone);
    if (this.sent) this.actor?.sent.delete(this.sent);
    this.actor?.held.splice(0);
    this.locked = undefined;
    this.end({ status: "rejected", reason: this.gone });
    this.heard();
  }

  async stop(): Promise<void> {
    this.end = () => {};
    await this.#worker.terminate();
  }
}

export class Threads implements ActorStage {
  readonly #threads: Thread[];
  readonly #names: readonly string[];
  readonly #actors: readonly ThreadActor[];
  /** Whoever is told when the answer to a step was heard. */
  #waits: { readonly step: ActorStep; readonly work: () => void } | undefined;
  #open = false;
  #runs = 0;
  /** Of those that wait for a lock. */
  #order = 0;
  readonly fair = true;
  readonly victims = true;
  changed: () => void = () => {};

  /** Absent: nobody knows where leases are. */
  readonly #expire: (() => Promise<void>) | undefined;

  constructor(
    names: readonly string[],
    actors: readonly ThreadActor[],
    expire: (() => Promise<void>) | undefined,
  ) {
    this.#expire = expire;
    if (engines().length === 0)
      throw new UnsupportedError(
        "explore: inThread needs the files of holdfast/testing where they were installed, not in a bundle",
      );
    this.#names = names;
    this.#actors = actors;
    this.#threads = actors.map((_, i) => this.#thread(i));
  }

  #thread(index: number): Thread {
    const actor = this.#actors[index] as ThreadActor;
    const thread: Thread = new Thread(this.#names[index] ?? "", actor, (said) => this.#hears(thread, said));
    return thread;
  }

  /** When the modules are loaded. */
  async ready(): Promise<void> {
    await Promise.all(this.#threads.map(({ ready }) => ready.promise));
  }

  /** After every actor has run once: whether what it does can be held back. */
  #check(): void {
    for (const { gone, name, libraries, clients, threw } of this.#threads) {
      if (gone) throw gone;
      if (libraries.length === 0)
        throw new UsageError(
          `explore: ${name} sends no statement that can be held back${threw ? `: it threw ${threw.message}` : ""}. Its client must be one of: ${clients.join(", ")}.`,
        );
    }
    const libraries = new Set(this.#threads.flatMap((thread) => thread.libraries));
    if (libraries.size > 1)
      throw new UsageError(
        `explore: the actors use more than one copy of the database's library: ${[...libraries].join(", ")}. In one process these do not see each other's locks.`,
      );
  }

  open(): void {
    if (this.#runs++ === 1) this.#check();
    this.#waits = undefined;
    this.#open = true;
    for (const thread of this.#threads) {
      thread.actor = undefined;
      thread.sent = undefined;
      thread.locked = undefined;
      thread.inside = false;
      thread.answered = 0;
      thread.refused.clear();
      thread.rests = thread.insists = undefined;
      thread.hold(true);
    }
  }

  /** Who is still held back goes on. */
  close(): void {
    this.#open = false;
    for (const thread of this.#threads) {
      thread.hold(false);
      if (thread.held) thread.tell(verdict.free);
      if (thread.locked) thread.tell(verdict.giveUp);
    }
  }

  async end(): Promise<void> {
    await Promise.all(this.#threads.map((thread) => thread.stop()));
  }

  start(actor: Actor): void {
    const thread = this.#threads[actor.index] as Thread;
    if (thread.gone) throw thread.gone;
    thread.actor = actor;
    thread.run((result) => {
      if (actor.crashed) return;
      actor.result = result;
      actor.asleep = false;
      this.changed();
    });
  }

  answered(to: ActorStep, work: () => void): void {
    this.#waits = { step: to, work };
  }

  /**
   * Not while somebody's transaction may be the file's only writer: nobody can take a lease either before it has ended, so that it
   * comes to the same, and we would wait for one that stands still.
   */
  async expire(): Promise<void> {
    if (!this.#threads.some(({ inside }) => inside)) await this.#expire?.();
  }

  /** Its thread ends, and its connections with it; the next one is another process, which imports its module anew. */
  async crash(actor: Actor): Promise<void> {
    actor.crashed = actor.over = true;
    actor.result = { status: "rejected", reason: new Error("its process has ended") };
    actor.held.length = 0;
    actor.sent.clear();
    const ended = this.#threads[actor.index] as Thread;
    await ended.stop();
    const next = this.#thread(actor.index);
    this.#threads[actor.index] = next;
    await next.ready.promise;
    next.libraries = ended.libraries;
    next.answered = ended.answered + 1;
    next.hold(this.#open);
  }

  async caughtUp(): Promise<void> {
    await Promise.all(this.#threads.map((thread) => thread.idle()));
  }

  /** Whoever waits for a lock tries again as soon as somebody else has done something; who came first is first. */
  async waiting(steps: readonly ActorStep[]): Promise<ReadonlyMap<ActorStep, ActorWait>> {
    for (const thread of this.#waiters())
      if (thread.sent && steps.includes(thread.sent)) await this.#again(thread);
    return new Map(
      this.#waiters().flatMap(({ sent, actor }) => {
        if (!sent || !actor || !steps.includes(sent)) return [];
        const actors = this.#others(actor.index);
        return [[sent, { actors, outside: actors.length === 0 ? [elsewhere] : [] }] as const];
      }),
    );
  }

  async describe(sessions: readonly string[]): Promise<readonly string[]> {
    return sessions;
  }

  /** Nobody can go on: for one of them the wait is over. */
  stuck(among: readonly Actor[], victim: number | undefined): boolean {
    // Whoever tries again may give its own locks back when it is refused once more.
    const patient = this.#threads.filter(
      ({ held, refused, rests }) => held && (refused.size > 0 || rests !== undefined),
    );
    for (const thread of patient) {
      thread.refused.clear();
      thread.rests = undefined;
    }
    if (patient.some((thread) => thread.insists !== this.#seen(thread))) {
      for (const thread of patient) thread.insists = this.#seen(thread);
      this.changed();
      return false;
    }
    const waiters = this.#waiters().filter(({ actor }) => actor && among.includes(actor));
    const chosen = waiters.find(({ actor }) => actor?.index === victim) ?? waiters[0];
    if (chosen) {
      chosen.locked = undefined;
      chosen.tell(verdict.giveUp);
      return true;
    }
    this.changed();
    return false;
  }

  #waiters(): Thread[] {
    return this.#threads
      .filter(({ locked }) => locked)
      .toSorted((a, b) => (a.locked?.since ?? 0) - (b.locked?.since ?? 0));
  }

  async #again(thread: Thread): Promise<void> {
    const { locked } = thread;
    const seen = this.#seen(thread);
    if (!locked || locked.seen === seen) return;
    locked.seen = seen;
    const { promise, resolve } = Promise.withResolvers<void>();
    thread.heard = resolve;
    thread.tell(verdict.again);
    await promise;
  }

  /** How much the others have done in this run. */
  #seen(thread: Thread): number {
    return this.#threads.reduce((sum, each) => sum + (each === thread ? 0 : each.answered), 0);
  }

  #others(index: number): number[] {
    return this.#threads.flatMap(({ inside, actor }) =>
      inside && actor && actor.index !== index ? [actor.index] : [],
    );
  }

  #hears(thread: Thread, said: Said): void {
    this.#understands(thread, said);
    thread.heard();
  }

  #understands(thread: Thread, said: Said): void {
    switch (said.kind) {
      case "idle":
        return;
      case "ready":
        thread.clients = said.clients;
        return thread.ready.resolve();
      case "failed":
        return thread.fail(revived(said.error));
      case "held":
        return this.#holds(thread, said);
      case "locked":
        return this.#locks(thread);
      case "answered":
        return this.#answers(thread, said);
      case "done":
        return this.#ends(thread, said);
    }
  }

  #holds(thread: Thread, { text, place }: Extract<Said, { kind: "held" }>): void {
    const { actor } = thread;
    thread.held = true;
    if (!this.#open || !actor) return thread.tell(verdict.free);
    const held = step(actor.index, text, place, { own: actor.own });
    actor.asleep = false;
    actor.held.push({
      step: held,
      // The same again comes to the same as long as nobody else has done anything.
      ready: () => {
        const seen = this.#seen(thread);
        return thread.refused.get(text) !== seen && (thread.inside || thread.rests !== seen);
      },
      send: () => {
        thread.sent = held;
        held.inside = thread.inside;
        thread.tell(verdict.go);
      },
    });
    this.changed();
  }

  #locks(thread: Thread): void {
    if (!this.#open) return thread.tell(verdict.giveUp);
    thread.locked = { since: thread.locked?.since ?? ++this.#order, seen: this.#seen(thread) };
  }

  #answers(thread: Thread, { rows, error, locked, inside }: Extract<Said, { kind: "answered" }>): void {
    const { actor, sent } = thread;
    thread.locked = undefined;
    thread.sent = undefined;
    thread.inside = inside;
    thread.answered++;
    if (actor && sent) {
      sent.rows.push(...rows);
      sent.error = error;
      sent.blocked = false;
      actor.sent.delete(sent);
      actor.asleep = false;
      if (locked) {
        thread.refused.set(sent.text, this.#seen(thread));
        if (sent.inside) thread.rests = this.#seen(thread);
      }
      sent.ends = sent.inside && !inside;
      if (this.#waits?.step === sent) {
        const { work } = this.#waits;
        this.#waits = undefined;
        work();
      }
    }
    this.changed();
  }

  #ends(thread: Thread, { value, thrown, libraries }: Extract<Said, { kind: "done" }>): void {
    thread.libraries = libraries;
    thread.threw = thrown && revived(thrown);
    thread.inside = false;
    // A transaction that it left open has ended.
    thread.answered++;
    thread.end(thread.threw ? { status: "rejected", reason: thread.threw } : { status: "fulfilled", value });
  }
}
