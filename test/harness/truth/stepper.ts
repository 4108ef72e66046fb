/**
 * The truth about a program, by brute force: every interleaving of its statements, on connections of its own. It knows nothing of the
 * explorer, and leaves nothing out but where statements go that only concern their own session: BEGIN, SAVEPOINT, SET.
 */
import { setTimeout as sleep } from "node:timers/promises";
import { type Answer, type FaultName, type Program, type Value, Refused, interpret } from "./program.ts";

export interface Session {
  readonly id: string;
  send(text: string): Promise<Answer>;
  /** Resolves when the server knows that it has ended. */
  end(): Promise<void>;
}

export interface Site {
  connect(): Promise<Session>;
  /** Of these sessions, those that wait for a lock. */
  waiting(ids: readonly string[]): Promise<ReadonlySet<string>>;
  /** Ends the statement of one of those that wait for each other. Absent: the server does so by itself. */
  sacrifice?(id: string): Promise<void>;
  reset(program: Program): Promise<unknown>;
  rows(program: Program): Promise<readonly (readonly Value[])[]>;
  /** A transaction by itself reads, and ends later: others can come in between. */
  readonly autocommit: "may race" | "is atomic";
}

export interface Result {
  readonly ok?: unknown;
  readonly refused?: string;
}

/** What can be seen of a run. */
export type Outcome = string;

export function outcomeOf(
  results: Readonly<Record<string, Result>>,
  rows: readonly (readonly Value[])[],
): Outcome {
  return JSON.stringify({ results, rows: rows.map((row) => JSON.stringify(row)).toSorted() });
}

/** Who gave up because of the others. */
const gaveUp: ReadonlySet<string> = new Set(["deadlock", "serialization", "locked", "busy"]);
const name = (kind: string) => (gaveUp.has(kind) ? "gave up" : kind);

export function resultOf(settled: PromiseSettledResult<unknown>): Result {
  if (settled.status === "fulfilled") return { ok: settled.value };
  const { name: kind = "" } = settled.reason as { name?: string };
  return { refused: name(kind) };
}

const local =
  /^(begin(?! immediate| exclusive)|start transaction(?! with consistent)|savepoint|release|set)\b/i;
const begins = /^(begin|start transaction)\b/i;
const writes = /^(insert|update|delete|with|replace|merge|truncate)\b|\b(book|bump) ?\(/i;

/** By actors, the numbers of their steps; and of those that make something lasting. */
type Steps = Map<number, { readonly all: Set<number>; readonly lasting: Set<number> }>;

interface Plan {
  readonly fault?: { readonly kind: FaultName; readonly actor: number; readonly nth: number };
}

/** Which of so many, at each place where there is a choice. */
type Choose = (among: readonly Move[]) => number;
interface Move {
  readonly kind: "turn" | "victim";
  readonly actor: number;
}

/** Whether something befalls the actor. `lasting`: the step has made something lasting. */
type AfterStep = (player: Player, lasting: boolean) => Promise<boolean>;

class Player {
  readonly index: number;
  readonly #program: Program;
  #running: Generator<string, unknown, Answer>;
  session: Session;
  next: string | undefined;
  result: Result | undefined;
  /** Sent, and not answered. */
  flying = false;
  waiting = false;
  inside = false;
  /** An answer that is kept until the COMMIT of its own. */
  kept: Answer | undefined;
  /** Steps that were answered. */
  answered = 0;
  calls = 1;
  /** It was refused at once, and tries again after others have done something. */
  rests = -1;

  constructor(program: Program, index: number, session: Session) {
    this.#program = program;
    this.index = index;
    this.session = session;
    this.#running = this.#begin();
    this.resume(() => this.#running.next());
  }

  #begin(): Generator<string, unknown, Answer> {
    return interpret(Object.values(this.#program.actors)[this.index] as Program["actors"][string]);
  }

  resume(go: () => IteratorResult<string, unknown>): void {
    try {
      const step = go();
      this.next = step.done ? undefined : step.value;
      if (step.done) this.result = { ok: step.value };
    } catch (error) {
      this.next = undefined;
      if (!(error instanceof Refused)) throw error;
      this.result = { refused: name(error.kind) };
    }
  }

  hear(answer: Answer): void {
    this.resume(() => this.#running.next(answer));
  }

  refuse(error: unknown): void {
    this.resume(() => this.#running.throw(error));
  }

  again(session: Session): void {
    this.session = session;
    this.result = this.kept = undefined;
    this.inside = this.flying = this.waiting = false;
    this.rests = -1;
    this.calls++;
    this.#running = this.#begin();
    this.resume(() => this.#running.next());
  }
}

export class TooLarge extends Error {}
export class Unstable extends Error {}

export class Stepper {
  readonly #site: Site;
  readonly #program: Program;
  readonly #sessions: (Session | undefined)[] = [];
  runs = 0;

  constructor(site: Site, program: Program) {
    this.#site = site;
    this.#program = program;
  }

  async close(): Promise<void> {
    for (const session of this.#sessions) await session?.end();
  }

  /** All outcomes, with one interleaving that leads there. */
  async all(most: number): Promise<Map<Outcome, string>> {
    const found = new Map<Outcome, string>();
    const steps: Steps = new Map();
    await this.#every({}, found, most, steps);
    for (const plan of this.#plans(steps)) await this.#every(plan, found, most, new Map());
    return found;
  }

  /** Each fault at each step at which it can happen. */
  #plans(steps: Steps): Plan[] {
    return this.#program.faults.flatMap((kind) =>
      [...steps].flatMap(([actor, { all, lasting }]) =>
        (kind === "twice" ? [0] : [...(kind === "lost commit" ? lasting : all)]).map((nth) => ({
          fault: { kind, actor, nth },
        })),
      ),
    );
  }

  async #every(plan: Plan, found: Map<Outcome, string>, most: number, steps: Steps): Promise<void> {
    let path: { among: readonly Move[]; taken: number }[] = [];
    for (;;) {
      let at = 0;
      const shown: string[] = [];
      const outcome = await this.run(
        plan,
        (among) => {
          const known = path[at];
          if (known && JSON.stringify(known.among) !== JSON.stringify(among))
            throw new Unstable(`${JSON.stringify(known.among)} became ${JSON.stringify(among)}`);
          if (!known) path.push({ among, taken: 0 });
          return (path[at++] as { taken: number }).taken;
        },
        (text) => shown.push(text),
        steps,
      );
      if (++this.runs > most) throw new TooLarge();
      if (!found.has(outcome))
        found.set(outcome, `${plan.fault ? `${JSON.stringify(plan.fault)}: ` : ""}${shown.join(" · ")}`);
      const last = path.findLastIndex(({ among, taken }) => taken + 1 < among.length);
      if (last < 0) return;
      path = path.slice(0, last + 1);
      (path[last] as { taken: number }).taken++;
    }
  }

  /** Outcomes of the actors one after the other. */
  async serial(): Promise<Set<Outcome>> {
    const { actors, mayGiveUp, faults, once } = this.#program;
    const indexes = Object.keys(actors).map((_, i) => i);
    const found = new Set<Outcome>();
    const steps = new Map() as Steps;
    for (const order of orders(indexes)) {
      found.add(await this.#inOrder(order, {}, [], steps));
      if (mayGiveUp)
        for (const absent of subsets(indexes.filter((i) => isOne(Object.values(actors)[i]?.body ?? []))))
          if (absent.length > 0 && absent.length < indexes.length)
            found.add(
              await this.#inOrder(
                order.filter((i) => !absent.includes(i)),
                {},
                absent,
                new Map(),
              ),
            );
    }
    if (faults.length > 0 && !once)
      for (const plan of this.#plans(steps)) {
        const { actor = 0 } = plan.fault ?? {};
        for (const order of orders([...indexes, actor]))
          found.add(await this.#inOrder(order, plan, [], new Map()));
      }
    return found;
  }

  #inOrder(order: readonly number[], plan: Plan, absent: readonly number[], steps: Steps): Promise<Outcome> {
    const left = [...order];
    const calls = new Map<number, number>();
    return this.run(
      plan,
      (among, players) => {
        for (;;) {
          const [first] = left;
          if (first === undefined) return 0;
          const player = players[first] as Player;
          const began = calls.get(first) ?? player.calls;
          calls.set(first, began);
          const at = among.findIndex(({ actor }) => actor === first);
          if (at >= 0 && player.calls === began) return at;
          left.shift();
          calls.delete(first);
        }
      },
      () => {},
      steps,
      absent,
    );
  }

  async #session(index: number): Promise<Session> {
    return (this.#sessions[index] ??= await this.#site.connect());
  }

  async run(
    plan: Plan,
    choose: (among: readonly Move[], players: readonly Player[]) => number,
    show: (text: string) => void,
    steps: Steps,
    absent: readonly number[] = [],
  ): Promise<Outcome> {
    await this.#site.reset(this.#program);
    const names = Object.keys(this.#program.actors);
    const players: Player[] = [];
    for (const index of names.keys())
      players.push(new Player(this.#program, index, await this.#session(index)));
    for (const index of absent) {
      const player = players[index] as Player;
      player.next = undefined;
      player.result = { refused: "gave up" };
    }
    const { fault } = plan;
    let befell = false;
    const done = () => players.reduce((sum, { answered }) => sum + answered, 0);
    for (;;) {
      await this.#settle(players, async (player, last) => {
        const known = steps.get(player.index) ?? { all: new Set(), lasting: new Set() };
        steps.set(player.index, known);
        known.all.add(player.answered - 1);
        if (last) known.lasting.add(player.answered - 1);
        if (!fault || befell || fault.actor !== player.index) return false;
        if (fault.kind === "twice" || player.answered - 1 !== fault.nth) return false;
        if (fault.kind === "lost commit" && !last) return false;
        befell = true;
        await player.session.end();
        this.#sessions[player.index] = undefined;
        const session = await this.#session(player.index);
        show(`${names[player.index]}: ${fault.kind}`);
        if (fault.kind === "lost commit") player.refuse(new Refused("lost", "the answer was lost"));
        player.again(session);
        return true;
      });
      const twice = fault?.kind === "twice" && !befell ? players[fault.actor] : undefined;
      if (twice?.result) {
        befell = true;
        show(`${names[twice.index]}: again`);
        twice.again(twice.session);
      }
      if (players.every(({ result }) => result)) break;
      const ready = players.filter((player) => !player.flying && (player.next !== undefined || player.kept));
      if (ready.length === 0) {
        const moves = players
          .filter(({ waiting }) => waiting)
          .map(({ index }): Move => ({ kind: "victim", actor: index }));
        await this.#deadlock(players, moves, (among) => choose(among, players));
        continue;
      }
      const rested = ready.filter(({ inside, rests, answered }) => inside || rests < done() - answered);
      const able = rested.length > 0 ? rested : ready;
      const moves = able.map(({ index }): Move => ({ kind: "turn", actor: index }));
      const player = able[choose(moves, players)] as Player;
      show(`${names[player.index]}: ${player.kept ? "COMMIT (by itself)" : player.next}`);
      await this.#turn(player, () => done() - player.answered);
    }
    const results = Object.fromEntries(names.map((each, i) => [each, players[i]?.result as Result]));
    return outcomeOf(results, await this.#site.rows(this.#program));
  }

  #events: (() => Promise<void>)[] = [];
  #wake = Promise.withResolvers<void>();
  #happened(what: () => Promise<void>): void {
    this.#events.push(what);
    this.#wake.resolve();
  }

  #afterStep: AfterStep = async () => false;

  /** One step: what concerns only its session comes along. */
  async #turn(player: Player, othersDone: () => number): Promise<void> {
    const { session } = player;
    if (player.kept) return this.#fly(player, "COMMIT", othersDone, true);
    while (player.next !== undefined && local.test(player.next)) {
      const text = player.next;
      player.inside ||= begins.test(text);
      try {
        player.hear(await session.send(text));
      } catch (error) {
        player.refuse(error);
      }
    }
    const text = player.next;
    if (text === undefined) return;
    if (this.#site.autocommit === "may race" && !player.inside && writes.test(text)) {
      await session.send("BEGIN");
      return this.#fly(player, text, othersDone, false, true);
    }
    if (begins.test(text)) player.inside = true;
    const ends = /^(commit$|rollback$)/i.test(text);
    const lasts = /^commit$/i.test(text) || (!player.inside && writes.test(text));
    if (ends) player.inside = false;
    return this.#fly(player, text, othersDone, lasts);
  }

  async #fly(
    player: Player,
    text: string,
    othersDone: () => number,
    lasts: boolean,
    opens = false,
  ): Promise<void> {
    player.flying = true;
    const { session } = player;
    const own = player.kept;
    const over = () => {
      player.flying = player.waiting = false;
      player.answered++;
      player.kept = undefined;
    };
    session.send(text).then(
      (answer) =>
        this.#happened(async () => {
          over();
          if (opens) player.kept = answer;
          if (await this.#afterStep(player, lasts)) return;
          if (!opens) player.hear(own ?? answer);
        }),
      (error: unknown) =>
        this.#happened(async () => {
          over();
          if (!(error instanceof Refused) || error.kind === "other") throw error;
          if (opens || own) await session.send("ROLLBACK");
          if (begins.test(text)) player.inside = false;
          if (error.kind === "busy") player.rests = othersDone();
          if (await this.#afterStep(player, false)) return;
          player.refuse(error);
        }),
    );
  }

  /** Until every statement is answered, or waits for a lock. */
  async #settle(players: readonly Player[], afterStep: AfterStep): Promise<void> {
    this.#afterStep = afterStep;
    const until = performance.now() + 10_000;
    for (;;) {
      while (this.#events.length > 0) await this.#events.shift()?.();
      const flying = players.filter((player) => player.flying);
      if (flying.length === 0) return;
      if (performance.now() > until) throw new Unstable("a statement is neither answered nor waits");
      this.#wake = Promise.withResolvers<void>();
      await Promise.race([this.#wake.promise, sleep(2)]);
      if (this.#events.length > 0) continue;
      const waiting = await this.#site.waiting(flying.map(({ session }) => session.id));
      if (this.#events.length > 0) continue;
      for (const player of flying) player.waiting = waiting.has(player.session.id);
      if (flying.every((player) => player.waiting)) return;
    }
  }

  async #deadlock(players: readonly Player[], moves: readonly Move[], choose: Choose): Promise<void> {
    this.#wake = Promise.withResolvers<void>();
    if (this.#events.length > 0) return;
    if (this.#site.sacrifice) {
      const victim = moves[choose(moves)] as Move;
      await this.#site.sacrifice((players[victim.actor] as Player).session.id);
    }
    const ended = await Promise.race([this.#wake.promise.then(() => true), sleep(3000, false)]);
    if (!ended) throw new Unstable("nobody can go on, and the server ends none of them");
  }
}

const isOne = (body: readonly { readonly do: string }[]) =>
  body.length === 1 && (body[0]?.do === "transaction" || body[0]?.do === "send");

export function orders(indexes: readonly number[]): number[][] {
  if (indexes.length < 2) return [[...indexes]];
  return indexes.flatMap((first, i) =>
    orders(indexes.filter((_, j) => j !== i)).map((rest) => [first, ...rest]),
  );
}

function subsets(indexes: readonly number[]): number[][] {
  return indexes.reduce<number[][]>((all, i) => [...all, ...all.map((some) => [...some, i])], [[]]);
}
