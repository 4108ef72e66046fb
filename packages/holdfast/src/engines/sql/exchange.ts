/** Read, decide, write: with a comparison of versions, or under locks. */
import { some } from "../../seam/errors.ts";
import type { SqlConnection } from "../../seam/database.ts";
import type { How } from "../../seam/store.ts";
import type { StoreDialect } from "./dialect.ts";

/** What a decision asks for before it can be made, or what it comes to. */
export type ExchangeDecided<Need, Answer, Writes> =
  { readonly need: Need } | { readonly verdicts: Answer; readonly writes: Writes };

export interface StoreExchange<View, Need, Answer, Writes> {
  /** What it decides about, for people and for the memory of conflicts: buckets, levels. */
  readonly names: readonly string[];
  /** False: it is locked first, also where it would be worth trying without. */
  readonly optimistic?: boolean;
  /** What is asked for can be relied on under locks only: it does not hold together with what was read without. */
  needsLocks?(need: Need): boolean;
  /** False: nothing is to be written. */
  changes?(writes: Writes): boolean;
  /**
   * `locked`: with locks, in one order, as of now. `needs`: what earlier decisions on this view asked for, in their order. Throws
   * {@link RowsMissing} outside of transactions of others, where all is read again.
   */
  read(locked: boolean, needs: readonly Need[]): Promise<View>;
  decide(view: View): ExchangeDecided<Need, Answer, Writes>;
  /**
   * `guarded`: only if everything is as it was read. False: it is not, or an id is taken; what it has written is undone. Not
   * guarded: false only before anything was written, or outside of transactions of others.
   */
  write(writes: Writes, guarded: boolean): Promise<boolean>;
}

/** Somebody else was faster. */
export class ExchangeConflict extends Error {
  constructor(names: readonly string[]) {
    super(`${some(names)}: changed by somebody else, again and again`);
  }
}

/**
 * Rows that everybody shares are missing. A transaction of their own makes them, and commits them whatever becomes of the call: of those who
 * wait for a row that InnoDB takes back, each keeps the gap that it leaves, and two are a deadlock.
 */
export class RowsMissing extends ExchangeConflict {
  /** Makes them with a statement for each: one that is given up takes back no row but its own. */
  readonly make: () => Promise<void>;

  constructor(names: readonly string[], make: () => Promise<void>) {
    super(names);
    this.make = make;
  }
}

/** How long a name that somebody else was faster at is locked first: long enough for a rush, short enough to forget one. */
const hotMs = 1000;
/** Of so many names, then all are forgotten. */
const mostHot = 10_000;
/** Of those who lock, and meet an id all the same. */
const mostAttempts = 5;
/** A view that is never complete is a fault of the decision. */
const mostNeeds = 10;

/** For so long after something could not be written, ids are looked for at once: who repeats one call repeats others. */
const repeatingMs = 1000;

/**
 * To look for the ids of a batch takes longer than all else that it does, and hardly any has been used: outside of transactions of
 * others one that is taken is met when it is written, which undoes the batch, and it is looked for then.
 */
export class RepeatedIds<C extends SqlConnection = SqlConnection> {
  readonly #dialect: Pick<StoreDialect<C>, "uniqueKeys" | "failure">;
  #until = 0;

  constructor(dialect: Pick<StoreDialect<C>, "uniqueKeys" | "failure">) {
    this.#dialect = dialect;
    if (dialect.uniqueKeys === false) this.#until = Infinity;
  }

  get lately(): boolean {
    return performance.now() < this.#until;
  }

  note(): void {
    this.#until = Math.max(this.#until, performance.now() + repeatingMs);
  }

  /** What was done, or undefined if it was undone since an id is taken: by now they are looked for. */
  async noting<T>(connection: C, doing: Promise<T> | undefined): Promise<T | undefined> {
    try {
      return await doing;
    } catch (error) {
      if (this.#dialect.failure(connection, error) !== "unique") throw error;
      this.note();
      return undefined;
    }
  }
}

/**
 * Several calls that wait for somebody's row are sent apart after so long: nobody's turn at a row takes longer, but a transaction of people's.
 * As on PostgreSQL, whose functions do it.
 */
const briefMs = 200;
/** Of the server itself, if it was not asked to end a wait: the least that some can. */
const leastMs = 1000;

type Briefly = <T>(work: () => Promise<T>) => Promise<T>;

export class Exchanges<C extends SqlConnection> {
  readonly #dialect: StoreDialect<C>;
  #hot = new Map<string, number>();

  constructor(dialect: StoreDialect<C>) {
    this.#dialect = dialect;
  }

  async run<View, Need, Answer, Writes>(
    connection: C,
    how: How,
    exchange: StoreExchange<View, Need, Answer, Writes>,
  ): Promise<Answer> {
    const dialect = this.#dialect;
    const { waitMs, free } = how;
    // A snapshot of the caller's may be older than what others have written: it is never compared, it is locked.
    if (!free) return dialect.inside(connection, waitMs, () => this.#inside(exchange));
    const { names, optimistic = true } = exchange;
    const decided =
      dialect.optimistic && optimistic && !this.isHot(names)
        ? await this.#decided(exchange, false)
        : undefined;
    if (decided) {
      const { verdicts, writes } = decided;
      if (exchange.changes?.(writes) === false) return verdicts;
      const written = () =>
        dialect.transaction(connection, waitMs, async () => {
          if (!(await exchange.write(writes, true))) throw new ExchangeConflict(names);
          return [];
        });
      // An id that is taken is looked for under locks.
      const orTaken = (error: unknown) => {
        if (dialect.failure(connection, error) !== "unique") throw error;
        return names;
      };
      if (await this.unlessFaster(connection, names, () => written().catch(orTaken))) return verdicts;
    }
    const bounded = how.several ? dialect.briefly : undefined;
    const brief: Briefly | undefined = bounded && ((work) => bounded(connection, briefMs, work));
    const atMost = brief ? Math.min(waitMs, leastMs) : waitMs;
    let missing: RowsMissing | undefined;
    for (let attempt = 1; ; attempt++)
      try {
        if (missing) await this.#make(connection, atMost, missing, brief);
        missing = undefined;
        return await dialect.transaction(connection, atMost, () => this.#locked(exchange, brief));
      } catch (error) {
        // An id that nobody's lock stands for, such as a new one: now it is there to be found.
        const taken = error instanceof ExchangeConflict || dialect.failure(connection, error) === "unique";
        if (!taken || attempt === mostAttempts) throw error;
        if (error instanceof RowsMissing) missing = error;
      }
  }

  /** If the wait for one of them is over, those that it has made until then stay: others may wait for them. */
  async #make(
    connection: C,
    waitMs: number,
    { make }: RowsMissing,
    brief: Briefly = (work) => work(),
  ): Promise<void> {
    let over: unknown;
    await this.#dialect.transaction(connection, waitMs, () =>
      brief(make).catch((error: unknown) => {
        if (this.#dialect.failure(connection, error) !== "lock-timeout") throw error;
        over = error;
      }),
    );
    if (over !== undefined) throw over;
  }

  /** Somebody else was faster at one of these lately. */
  isHot(names: readonly string[]): boolean {
    const now = performance.now();
    return names.some((name) => (this.#hot.get(name) ?? 0) > now);
  }

  /** Whether something was done that is done only if nobody was faster; else that is remembered. `work`: at which of them somebody was. */
  async unlessFaster(
    connection: C,
    names: readonly string[],
    work: () => Promise<readonly string[]>,
  ): Promise<boolean> {
    let lost = names;
    try {
      lost = await work();
    } catch (error) {
      if (!this.#lostRace(connection, error)) throw error;
    }
    this.#heat(lost);
    return lost.length === 0;
  }

  async #inside<View, Need, Answer, Writes>(
    exchange: StoreExchange<View, Need, Answer, Writes>,
  ): Promise<Answer> {
    for (let attempt = 1; ; attempt++)
      try {
        return await this.#locked(exchange);
      } catch (error) {
        if (!(error instanceof ExchangeConflict) || attempt === mostAttempts) throw error;
      }
  }

  #lostRace(connection: C, error: unknown): boolean {
    if (error instanceof ExchangeConflict) return true;
    const failure = this.#dialect.failure(connection, error);
    return failure === "serialization" || failure === "deadlock";
  }

  async #locked<View, Need, Answer, Writes>(
    exchange: StoreExchange<View, Need, Answer, Writes>,
    brief?: Briefly,
  ): Promise<Answer> {
    const decided = await this.#decided(exchange, true, brief);
    if (!decided || !(await exchange.write(decided.writes, false)))
      throw new ExchangeConflict(exchange.names);
    return decided.verdicts;
  }

  async #decided<View, Need, Answer, Writes>(
    exchange: StoreExchange<View, Need, Answer, Writes>,
    locked: boolean,
    brief: Briefly = (work) => work(),
  ): Promise<{ readonly verdicts: Answer; readonly writes: Writes } | undefined> {
    const needs: Need[] = [];
    for (;;) {
      const decided = exchange.decide(await brief(() => exchange.read(locked, needs)));
      if (!("need" in decided)) return decided;
      if (!locked && exchange.needsLocks?.(decided.need)) return undefined;
      if (needs.push(decided.need) > mostNeeds)
        throw new Error(`${some(exchange.names)}: a decision asks for more and more`);
    }
  }

  #heat(names: readonly string[]): void {
    if (this.#hot.size > mostHot) this.#hot = new Map();
    for (const name of names) this.#hot.set(name, performance.now() + hotMs);
  }
}
