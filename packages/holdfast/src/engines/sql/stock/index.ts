/**
 * Stock for any engine with a dialect: rows are read, `stock/decide.ts` decides, and what it says is written.
 *
 * A level is compared whole (reservations do not count its version up), and so is every row that goes or changes: what was
 * decided is a function of these.
 */
import type { SqlConnection } from "../../../seam/database.ts";
import { type Statement, sql } from "../../../seam/sql.ts";
import type { How } from "../../../seam/store.ts";
import {
  type StockChange,
  type StockDecision,
  type StockCall,
  type StockNeed,
  type StockView,
  type StockWrites,
  decide,
  decideMinimum,
  putsInto,
  spotsOf,
} from "../../../stock/decide/index.ts";
import type { LevelRow, ReservationRow } from "../../../stock/decide/rows.ts";
import { ofReservation, ofSale } from "../../../stock/decide/sequel.ts";
import type { StockBook, Sequel, Spot, StockStore, OrderVerdict } from "../../../stock/store.ts";
import { RowsAtOnce } from "../at-once.ts";
import type { StoreDialect } from "../dialect.ts";
import { type StoreExchange, Exchanges, RepeatedIds, RowsMissing } from "../exchange.ts";
import { inOneCall } from "../one-call.ts";
import { StoredRows, chunksOf } from "../rows.ts";
import { stockLists } from "./lists.ts";
import { stockLevel, stockMovement, stockReservation, stockReserved } from "./tables.ts";
import { stockUpkeep } from "./upkeep.ts";
import type { RowOf, Table } from "../table.ts";

/** With more levels, locking them in one statement is less than comparing them one by one. */
const fewLevels = 3;

export function stockStore<C extends SqlConnection>(dialect: StoreDialect<C>): StockStore<C> {
  const rows = new StoredRows(dialect);
  const exchanges = new Exchanges(dialect);
  const repeated = new RepeatedIds(dialect);
  const run = <T>(connection: C, how: How, exchange: StockExchange<T>): Promise<T> =>
    rows.present(connection, "A table of stock", () => exchanges.run(connection, how, exchange));
  return {
    async decide(connection, book, orders, { make, look, ...how }) {
      const calls = orders.map((order) => ({
        ...order,
        of: order.kind === "reserve" ? order.id : undefined,
      }));
      const done =
        repeated.lately || !arePlain(calls, how)
          ? undefined
          : await repeated.noting(
              connection,
              ordersAtOnce(rows, connection, book, calls, how) ??
                ordersInOneCall(rows, exchanges, connection, book, calls),
            );
      if (done) return done;
      const work = new StockWork(rows, connection, book, how, make);
      if (make && how.free && dialect.optimistic)
        await rows.present(connection, "A table of stock", () => work.makeLevels(calls));
      // In the caller's transaction an id that is taken must be found before it is written.
      const late = how.free && !repeated.lately && calls.every(writesItsId);
      return run(connection, how, exchangeOf(work, calls, look && (late ? repeated : true)));
    },

    async follow(connection, book, sequel, how) {
      const work = new StockWork(rows, connection, book, how);
      const call = await rows.present(connection, "A table of stock", () => work.find(sequel));
      if (typeof call === "string")
        return { outcome: call, at: 0, until: undefined, state: undefined, lines: [] };
      const [verdict] = await run(connection, how, exchangeOf(work, [call], true));
      return verdict as OrderVerdict;
    },

    async minimum(connection, book, spot, min, how) {
      const work = new StockWork(rows, connection, book, how);
      const read = (locked: boolean, needs: readonly StockNeed[]) =>
        work.read([spot], [], { locked, needs, look: false });
      return run(connection, how, {
        ...work.exchange([spot]),
        read,
        decide: (view) => decideMinimum(view, spot, min),
      });
    },

    lists: stockLists(rows),
    upkeep: stockUpkeep(rows),
  };
}

/** Orders as most are: they reserve nothing, and their ids are met where they are written. */
const arePlain = (calls: readonly StockCall[], { free }: How): boolean =>
  free && calls.every((call) => call.kind !== "reserve" && writesItsId(call));

/** Plain orders of levels that are there, and with room. Undefined: they are not, or have to be waited for. */
function ordersAtOnce<C extends SqlConnection>(
  rows: StoredRows<C>,
  connection: C,
  { name: book }: StockBook,
  calls: readonly StockCall[],
  { waitMs }: How,
): Promise<readonly OrderVerdict[] | undefined> | undefined {
  return rows.dialect.atOnce?.(connection, waitMs, (at) => {
    const tables = new RowsAtOnce(at, rows);
    const levels: LevelRow[] = [];
    for (const { sku, location } of spotsOf(calls)) {
      const level = tables.find(stockLevel, [book, sku, location]);
      if (!level) return undefined;
      levels.push(level);
    }
    const done = decidePlain({ book, at: tables.now(), levels }, calls);
    if (!done) return undefined;
    const { verdicts, writes } = done;
    for (const { after } of writes.levels)
      tables.update(stockLevel, [book, after.sku, after.location], changed(after));
    tables.insert(stockMovement, writes.movements);
    return verdicts;
  });
}

/** Undefined: what is not done may have been done before, or may find room where something has run out. */
function decidePlain(view: Pick<StockView, "book" | "at" | "levels">, calls: readonly StockCall[]) {
  const nothing = { returned: [], reservations: [], reserved: [], cleared: new Set<number>() };
  const decided = decide({ ...view, movements: [], ...nothing }, calls);
  return "need" in decided || decided.verdicts.some(({ outcome }) => outcome !== "done")
    ? undefined
    : decided;
}

/** The same where a message takes its time. */
function ordersInOneCall<C extends SqlConnection>(
  rows: StoredRows<C>,
  exchanges: Exchanges<C>,
  connection: C,
  { name: book }: StockBook,
  calls: readonly StockCall[],
): Promise<readonly OrderVerdict[] | undefined> {
  const spots = spotsOf(calls);
  return inOneCall(rows, exchanges, connection, {
    of: stockLevel,
    into: stockMovement,
    compared: changed,
    set: changed,
    names: spots.map((spot) => titleOf(book, spot)),
    nameOf: (level) => titleOf(book, level),
    where: rows.matching(
      stockLevel,
      spots.map(({ sku, location }) => ({ book, sku, location })),
    ),
    decide(found, at) {
      if (found.length < spots.length) return undefined;
      const decided = decidePlain({ book, at, levels: found }, calls);
      if (!decided) return undefined;
      const { levels, movements, until } = decided.writes;
      return { answer: decided.verdicts, changed: levels, added: movements, until };
    },
  });
}

type StockExchange<T> = StoreExchange<StockView, StockNeed, T, StockWrites>;

/** Done, it has a movement with its id at each of its levels; or it is known by a row of its own, which is read in any case. */
function writesItsId({ kind, lines }: StockCall): boolean {
  return (
    kind === "reserve" || ((kind === "apply" || kind === "transfer") && lines.every((line) => line.quantity))
  );
}

/** `look`: ids may have been used before. They are looked for at once, or if something is not done, or could not be written. */
function exchangeOf<C extends SqlConnection>(
  work: StockWork<C>,
  calls: readonly StockCall[],
  look: boolean | RepeatedIds,
): StockExchange<readonly OrderVerdict[]> {
  const spots = spotsOf(calls);
  const exchange = work.exchange(spots);
  let looking = look === true || calls.some(({ kind }) => kind === "return");
  let written = false;
  return {
    ...exchange,
    read(locked, needs) {
      if (written && look instanceof RepeatedIds) look.note();
      return work.read(spots, calls, { locked, needs, look: looking });
    },
    decide(view): StockDecision<readonly OrderVerdict[]> {
      const decided = decide(view, calls);
      if ("need" in decided || looking || look === false) return decided;
      if (decided.verdicts.every(({ outcome }) => outcome === "done")) return decided;
      // It may have been done before.
      looking = true;
      return { need: { levels: [], cleared: [] } };
    },
    write(writes, guarded) {
      // What was not looked for may be why it could not be written.
      looking = written = true;
      return exchange.write(writes, guarded);
    },
  };
}

interface Reading {
  readonly locked: boolean;
  readonly needs: readonly StockNeed[];
  readonly look: boolean;
}

/** Reads and writes of one call, on its connection. */
class StockWork<C extends SqlConnection> {
  readonly #rows: StoredRows<C>;
  readonly #connection: C;
  readonly #book: StockBook;
  readonly #free: boolean;
  readonly #new: boolean;
  /** As they were read, and when. */
  #held: { readonly levels: readonly LevelRow[]; readonly at: number } = { levels: [], at: 0 };

  /** `new`: some levels may not be there yet. */
  constructor(rows: StoredRows<C>, connection: C, book: StockBook, { free }: How, isNew = false) {
    this.#rows = rows;
    this.#connection = connection;
    this.#book = book;
    this.#free = free;
    this.#new = isNew;
  }

  exchange(spots: readonly Spot[]) {
    return {
      names: spots.map((spot) => titleOf(this.#book.name, spot)),
      optimistic: spots.length <= fewLevels,
      // A level that was read before lines went away looks as if there was nothing to clear.
      needsLocks: ({ cleared }: StockNeed) => cleared.length > 0,
      changes: ({ levels, movements, reservations, reserved }: StockWrites) =>
        [levels, movements, reservations.insert, reservations.update, reserved.delete, reserved.insert].some(
          ({ length }) => length > 0,
        ),
      write: (writes: StockWrites, guarded: boolean) => this.#write(writes, guarded),
    };
  }

  /**
   * What was done under an id is read last: whoever is told that something is over, or that there is too little, would have
   * been told of it.
   */
  async read(
    spots: readonly Spot[],
    calls: readonly StockCall[],
    { locked, needs, look }: Reading,
  ): Promise<StockView> {
    const missing = needs.at(-1)?.levels ?? [];
    // What is locked stays as it is; and a level that was not there must not be locked now, after later ones.
    if (!locked || needs.length === 0 || missing.length > 0)
      this.#held = await this.#hold(spots, calls, { locked, missing });
    const { levels, at } = this.#held;
    const numbers = levels.map(({ id }) => id);
    const kept = calls.filter(({ kind }) => kind === "reserve" || kind === "commit" || kind === "release");
    const ids = kept.map(({ of }) => of as string);
    const sales = calls.flatMap(({ kind, of }) => (kind === "return" ? [of as string] : []));
    const cleared = new Set(needs.flatMap((need) => need.cleared));
    const reservations = await this.#reservations(ids, locked);
    const lines = await this.#all(stockReserved, numbers, "level", ids, "reservation", locked);
    const over = await this.#over([...cleared], at, locked);
    const returned = await this.#all(stockMovement, numbers, "level", sales, "origin", locked);
    const named = look ? [...sales, ...calls.map(({ id }) => id)] : [];
    const movements = await this.#all(stockMovement, numbers, "level", named, "external_id", locked);
    return {
      book: this.#book.name,
      at,
      levels,
      movements,
      returned: sums(returned),
      reservations,
      reserved: [...lines, ...over.filter((row) => !ids.includes(row.reservation))],
      cleared,
    };
  }

  /** Levels that may not be there yet, before anything is locked: who waits for another one's INSERT holds nothing. */
  async makeLevels(calls: readonly StockCall[]): Promise<void> {
    const spots = spotsOf(calls, putsInto);
    const there = new Set((await this.#levels(spots, false)).map(nameOf));
    await this.#make(spots.filter((spot) => !there.has(nameOf(spot))));
  }

  async #hold(
    spots: readonly Spot[],
    calls: readonly StockCall[],
    { locked, missing }: { readonly locked: boolean; readonly missing: readonly Spot[] },
  ) {
    if (!locked) await this.#make(missing);
    const there = locked ? await this.#lockAndMake(spots, calls, missing) : spots;
    const moments: number[] = [];
    const levels = await this.#levels(there, locked, moments);
    return { levels, at: await this.#rows.clockAfter(this.#connection, moments) };
  }

  /** In the order that is everybody's, as far as it is known what is there. Resolves to those that may be. */
  async #lockAndMake(
    spots: readonly Spot[],
    calls: readonly StockCall[],
    missing: readonly Spot[],
  ): Promise<readonly Spot[]> {
    if (missing.length > 0 && this.#free)
      throw new RowsMissing(missing.map(nameOf), async () => {
        for (const each of missing) await this.#make([each]);
        if ((await this.#levels(missing, false)).length < missing.length) throw this.#rows.hidden(stockLevel);
      });
    await this.#make(missing);
    const there: Spot[] = [];
    const lock = async (some: readonly Spot[]) => there.push(...(await this.#levels(some, true)));
    const make = async (some: readonly Spot[]) => {
      await this.#make(some);
      there.push(...some);
    };
    if (this.#new && !this.#free && spots.length > 1 && missing.length === 0) {
      const made = new Set(spotsOf(calls, putsInto).map(nameOf));
      // The caller's transaction keeps what it has locked: it cannot begin again.
      for (const spot of spots) {
        const before = there.length;
        await lock([spot]);
        if (there.length === before && made.has(nameOf(spot))) await make([spot]);
      }
    } else return spots;
    return there;
  }

  async #make(spots: readonly Spot[]): Promise<void> {
    const nothing = { on_hand: 0, reserved: 0, min_level: 0, version: 0, elsewhere: false };
    for (const some of chunksOf(spots))
      await this.#rows.insertMissing(
        this.#connection,
        stockLevel,
        some.map(({ sku, location }) => ({ book: this.#book.name, sku, location, ...nothing })),
      );
  }

  /** In the order of their names, which is everybody's. */
  async #levels(spots: readonly Spot[], locked: boolean, moments: number[] = []): Promise<LevelRow[]> {
    const found: LevelRow[] = [];
    for (const some of chunksOf(spots)) {
      const book = this.#book.name;
      const where = this.#rows.matching(
        stockLevel,
        some.map(({ sku, location }) => ({ book, sku, location })),
      );
      const options = {
        order: this.#rows.order(stockLevel),
        locking: locked ? ("update" as const) : undefined,
        moments,
      };
      found.push(...(await this.#rows.select(this.#connection, stockLevel, where, options)));
    }
    return found;
  }

  async #reservations(ids: readonly string[], locked: boolean): Promise<ReservationRow[]> {
    const found: RowOf<typeof stockReservation>[] = [];
    for (const some of chunksOf(ids)) {
      const where = sql`${this.#rows.is(stockReservation, "book", this.#book.name)} AND ${this.#rows.among(stockReservation, "id", some)}`;
      found.push(...(await this.#select(stockReservation, where, locked)));
    }
    return found as ReservationRow[];
  }

  /** Lines that have run out. */
  async #over(
    levels: readonly number[],
    at: number,
    locked: boolean,
  ): Promise<RowOf<typeof stockReserved>[]> {
    const found: RowOf<typeof stockReserved>[] = [];
    for (const some of chunksOf(levels)) {
      const where = sql`${this.#rows.among(stockReserved, "level", some)} AND ${this.#rows.compare(stockReserved, "until", "<=", at)}`;
      found.push(...(await this.#select(stockReserved, where, locked)));
    }
    return found;
  }

  /** Rows at these levels that have one of these names. */
  async #all<T extends Table>(
    of: T,
    levels: readonly number[],
    level: string & keyof T["columns"],
    names: readonly string[],
    name: string & keyof T["columns"],
    locked: boolean,
  ): Promise<RowOf<T>[]> {
    const found: RowOf<T>[] = [];
    for (const someNames of chunksOf(names))
      for (const some of chunksOf(levels)) {
        const where = sql`${this.#rows.among(of, name, someNames)} AND ${this.#rows.among(of, level, some)}`;
        found.push(...(await this.#select(of, where, locked)));
      }
    return found;
  }

  async #select<T extends Table>(of: T, where: Statement, locked: boolean): Promise<RowOf<T>[]> {
    const locking = locked ? "current" : undefined;
    const found: readonly unknown[] = await this.#rows.select(this.#connection, of, where, { locking });
    return found as RowOf<T>[];
  }

  /** The lines of what came before, which do not change: they are found before anything is locked. */
  async find(sequel: Sequel): Promise<StockCall | OrderVerdict["outcome"]> {
    if (sequel.kind === "return") return ofSale(sequel, sequel.lines ? [] : await this.#sold(sequel));
    // A snapshot of the caller's may be older than the reservation.
    let [row] = await this.#reservations([sequel.of], false);
    if (!row && !this.#free) [row] = await this.#reservations([sequel.of], true);
    const spots = row ? await this.#spots(row.levels) : new Map<number, Spot>();
    return ofReservation(sequel, row, spots) ?? "unknown";
  }

  async #spots(numbers: readonly number[]): Promise<Map<number, LevelRow>> {
    const found = new Map<number, LevelRow>();
    const look = async (missing: readonly number[], locked: boolean) => {
      for (const some of chunksOf(missing)) {
        const rows = await this.#select(stockLevel, this.#rows.among(stockLevel, "id", some), locked);
        for (const row of rows) if (row.book === this.#book.name) found.set(row.id, row);
      }
    };
    await look(numbers, false);
    if (!this.#free)
      await look(
        numbers.filter((number) => !found.has(number)),
        true,
      );
    return found;
  }

  async #sold({ id, of }: Sequel) {
    const locked = !this.#free;
    const where = sql`${this.#rows.is(stockMovement, "external_id", of)} AND ${this.#rows.compare(stockMovement, "quantity", "<", 0)} AND ${this.#rows.among(stockMovement, "kind", ["apply", "commit"])}`;
    const sold = await this.#select(stockMovement, where, locked);
    const returns = await this.#select(stockMovement, this.#rows.is(stockMovement, "origin", of), locked);
    const others = sums(returns.filter(({ external_id }) => external_id !== id));
    const spots = await this.#spots(sold.map(({ level }) => level));
    return sold.flatMap(({ level, quantity }) => {
      const spot = spots.get(level);
      const back = others.find((each) => each.level === level)?.quantity ?? 0;
      return spot ? [{ sku: spot.sku, location: spot.location, sold: -quantity, back }] : [];
    });
  }

  /** New reservations first: an id that somebody else has taken meanwhile is seen before anything is written. */
  async #write(
    { levels, movements, reservations, reserved, until }: StockWrites,
    guarded: boolean,
  ): Promise<boolean> {
    const [rows, connection] = [this.#rows, this.#connection];
    for (const some of chunksOf(reservations.insert))
      if ((await rows.countMissing(connection, stockReservation, some)) < some.length) return false;
    if (guarded) {
      if (!(await this.#compareAndSet(levels, until))) return false;
    } else await this.#set(levels);
    for (const some of chunksOf(reserved.delete)) {
      if ((await rows.removeRows(connection, stockReserved, some)) < some.length) return false;
    }
    for (const { before, after } of reservations.update) {
      const { book, id, state, until: end } = before;
      const where = rows.matching(stockReservation, [{ book, id, state, until: end }]);
      const set = { state: after.state, until: after.until, made_at: after.made_at };
      if ((await rows.update(connection, stockReservation, where, set)) < 1) return false;
    }
    for (const some of chunksOf(movements)) await rows.insert(connection, stockMovement, some);
    for (const some of chunksOf(reserved.insert)) await rows.insert(connection, stockReserved, some);
    return true;
  }

  /**
   * Each as it was read, in their order. A level that comes out as it was is not compared: what was taken out of it to make
   * room is, line by line.
   */
  async #compareAndSet(
    levels: readonly StockChange<LevelRow>[],
    until: number | undefined,
  ): Promise<boolean> {
    const { dialect } = this.#rows;
    const inTime =
      until === undefined ? sql`` : sql` AND ${dialect.clock} < ${dialect.write("integer", until)}`;
    for (const { before, after } of levels) {
      const { id, on_hand, reserved, min_level, version } = before;
      const where = sql`${this.#rows.matching(stockLevel, [{ id, on_hand, reserved, min_level, version }])}${inTime}`;
      if ((await this.#rows.update(this.#connection, stockLevel, where, changed(after))) < 1) return false;
    }
    return true;
  }

  async #set(levels: readonly StockChange<LevelRow>[]): Promise<void> {
    for (const some of chunksOf(levels))
      await this.#rows.updateAll(
        this.#connection,
        stockLevel,
        "id",
        some.map(({ after }) => ({ id: after.id, ...changed(after) })),
      );
  }
}

const changed = ({ on_hand, reserved, min_level, version }: LevelRow) => ({
  on_hand,
  reserved,
  min_level,
  version,
});

/** For people. */
const titleOf = (book: string, { sku, location }: Spot) => `stock ${book}:${sku}:${location}`;

const nameOf = ({ sku, location }: Spot) => `${sku}\0${location}`;

/** What came back, by sale and level. */
function sums(rows: readonly RowOf<typeof stockMovement>[]) {
  const found = new Map<
    string,
    { readonly origin: string; readonly level: number; readonly quantity: number }
  >();
  for (const { origin = "", level, quantity } of rows) {
    const name = `${level}\0${origin}`;
    found.set(name, { origin, level, quantity: (found.get(name)?.quantity ?? 0) + quantity });
  }
  return [...found.values()];
}
