/**
 * The decision about stock against the functions on the server: the same calls, on the same rows, have the same answers and
 * leave the same rows, column by column. States are random, and worse than calls alone could make them.
 */
import { holdfast } from "holdfast";
import { fromPg } from "holdfast/pg";
import { Pool, type PoolClient } from "pg";
import { describe, expect, inject, test } from "vitest";
import type { Database, SqlConnection } from "../../packages/holdfast/src/seam/database.ts";
import {
  type StockDecision,
  type StockCall,
  type StockView,
  type StockWrites,
  decide,
  decideMinimum,
} from "../../packages/holdfast/src/stock/decide/index.ts";
import {
  addsUp,
  decideRepair,
  emptyLedger,
  extend,
  factsOf,
} from "../../packages/holdfast/src/stock/decide/ledger.ts";
import type {
  LevelRow,
  MovementRow,
  ReservationRow,
  ReservedRow,
} from "../../packages/holdfast/src/stock/decide/rows.ts";
import { ofReservation, ofSale } from "../../packages/holdfast/src/stock/decide/sequel.ts";
import type {
  MovementAbout,
  StockBook,
  StockOrder,
  OrderLine,
  Sequel,
  StockStore,
  OrderVerdict,
} from "../../packages/holdfast/src/stock/store.ts";
import { compareSpots, sumLines } from "../../packages/holdfast/src/stock/domain.ts";
import { createDatabase } from "../harness/databases.ts";
import { random } from "../harness/random.ts";

const seeds = process.env["HOLDFAST_LONG"] === "1" ? 100 : 3;
const steps = 150;
const book: StockBook = { name: "book", table: undefined };
const how = { waitMs: 5000, free: true };

interface State {
  readonly levels: readonly LevelRow[];
  readonly movements: readonly MovementRow[];
  readonly reservations: readonly ReservationRow[];
  readonly reserved: readonly ReservedRow[];
}

/** Everything, in one order. */
async function stateOf(client: PoolClient): Promise<State> {
  const micros = (column: string) => `(extract(epoch FROM ${column}) * 1000000)::bigint::float8 AS ${column}`;
  const read = async <Row>(text: string): Promise<Row[]> => {
    const { rows } = await client.query(text);
    // As the decision has it.
    return rows.map((row: object) =>
      Object.fromEntries(Object.entries(row).map(([name, value]) => [name, (value as unknown) ?? undefined])),
    ) as Row[];
  };
  return {
    levels:
      await read(`SELECT id::int, book, sku, location, on_hand::float8, reserved::float8, min_level::float8, version::int, elsewhere
      FROM holdfast.stock_level ORDER BY id`),
    movements:
      await read(`SELECT level::int, version::int, quantity::float8, balance::float8, ${micros("at")}, line, parts, kind, source,
      external_id, reference_type, reference_id, user_id, note, origin FROM holdfast.stock_movement t ORDER BY t.level, t.version`),
    reservations:
      await read(`SELECT book, id, state, ${micros("until")}, ${micros("made_at")}, levels::int[], quantities::int[], source,
      reference_type, reference_id, user_id, note FROM holdfast.stock_reservation t ORDER BY t.id`),
    reserved:
      await read(`SELECT level::int, reservation, quantity::float8, ${micros("until")} FROM holdfast.stock_reserved t
      ORDER BY t.level, t.reservation`),
  };
}

function written(state: State, writes: StockWrites): State {
  const changed = <Row>(rows: readonly Row[], changes: readonly { before: Row; after: Row }[]) =>
    rows.map((row) => changes.find(({ before }) => before === row)?.after ?? row);
  const by =
    <Row>(...names: (keyof Row)[]) =>
    (a: Row, b: Row) => {
      for (const name of names) if (a[name] !== b[name]) return a[name] < b[name] ? -1 : 1;
      return 0;
    };
  const { movements, reservations, reserved } = writes;
  return {
    levels: changed(state.levels, writes.levels),
    movements: [...state.movements, ...movements].toSorted(by<MovementRow>("level", "version")),
    reservations: [...changed(state.reservations, reservations.update), ...reservations.insert].toSorted(
      by<ReservationRow>("id"),
    ),
    reserved: [
      ...state.reserved.filter((row) => !reserved.delete.includes(row)),
      ...reserved.insert,
    ].toSorted(by<ReservedRow>("level", "reservation")),
  };
}

/** Reads what it asks for out of rows. `after`: levels that the server made, for those that it wants made. */
function decided<T>(
  state: State,
  after: State,
  at: number,
  calls: readonly StockCall[],
  ask: (view: StockView) => StockDecision<T>,
): { readonly verdicts: T; readonly state: State } {
  const ids = new Set(calls.flatMap(({ id, of }) => [id, of]));
  const mine = (level: number) => of.levels.some(({ id }) => id === level);
  let of = state;
  const cleared = new Set<number>();
  for (let round = 0; round < 5; round++) {
    const returned = new Map<string, { origin: string; level: number; quantity: number }>();
    for (const { origin, level, quantity } of of.movements)
      if (origin !== undefined) {
        const name = `${origin} ${level}`;
        returned.set(name, { origin, level, quantity: (returned.get(name)?.quantity ?? 0) + quantity });
      }
    const decision = ask({
      book: book.name,
      at,
      levels: of.levels,
      movements: of.movements.filter((row) => ids.has(row.external_id) && mine(row.level)),
      returned: [...returned.values()],
      reservations: of.reservations.filter(({ id }) => ids.has(id)),
      reserved: of.reserved.filter(
        ({ reservation, level, until }) => ids.has(reservation) || (cleared.has(level) && until <= at),
      ),
      cleared,
    });
    if (!("need" in decision)) return { verdicts: decision.verdicts, state: written(of, decision.writes) };
    for (const level of decision.need.cleared) cleared.add(level);
    const fresh = after.levels
      .filter(({ sku, location }) =>
        decision.need.levels.some((spot) => spot.sku === sku && spot.location === location),
      )
      .map((row) => ({ ...row, on_hand: 0, reserved: 0, min_level: 0, version: 0 }));
    of = { ...of, levels: [...of.levels, ...fresh].toSorted((a, b) => a.id - b.id) };
  }
  throw new Error("it always needs something more");
}

/** What both must say. What is on hand is told where something was done; what there is, where it was refused. */
function said({ outcome, at, until, state, lines }: OrderVerdict) {
  const did = outcome === "done" || outcome === "before";
  return {
    outcome,
    until,
    state,
    ...(did && { at }),
    lines: lines.map(({ sku, location, quantity, onHand, version, room }) =>
      did ? { sku, location, quantity, onHand, version } : { sku, location, quantity, room },
    ),
  };
}

const skus = ["A", "B", "C"];
const locations = ["main", "north"];

class Player {
  readonly next: () => number;
  readonly #fresh = { n: 0 };
  readonly #orders: StockOrder[] = [];
  readonly #sequels: Sequel[] = [];

  constructor(seed: number) {
    this.next = random(seed);
  }

  below(n: number): number {
    return Math.floor(this.next() * n);
  }

  one<T>(list: readonly T[]): T {
    return list[this.below(list.length)] as T;
  }

  about(): MovementAbout {
    const reference =
      this.next() < 0.3 ? { referenceType: "order", referenceId: this.one(["1", "2"]) } : undefined;
    return {
      source: this.next() < 0.7 ? "ORDER" : "MANUAL",
      referenceType: reference?.referenceType,
      referenceId: reference?.referenceId,
      by: this.next() < 0.5 ? "ada" : undefined,
      note: undefined,
    };
  }

  lines(quantity: () => number): OrderLine[] {
    const lines = Array.from({ length: 1 + this.below(3) }, () => ({
      sku: this.one(skus),
      location: this.one(locations),
      quantity: quantity(),
    }));
    return sumLines(lines)
      .filter((line) => line.quantity !== 0)
      .toSorted(compareSpots);
  }

  id(kind: string): string {
    return this.next() < 0.5 ? `${kind} ${this.below(6)}` : `${kind} fresh ${++this.#fresh.n}`;
  }

  order(): StockOrder {
    const kind = this.one(["apply", "apply", "apply", "adjust", "transfer", "reserve", "reserve"] as const);
    const about = this.about();
    if (kind === "reserve")
      return {
        kind,
        id: this.id("r"),
        about,
        ttlMs: 1 + this.below(3_600_000),
        lines: this.#some(() => 1 + this.below(4)),
      };
    const id = this.id("m");
    if (kind === "adjust") {
      const lines = [{ sku: this.one(skus), location: this.one(locations), quantity: this.below(12) }];
      return { kind, id, about, ttlMs: undefined, lines };
    }
    if (kind === "transfer") {
      const [sku, quantity, back] = [this.one(skus), 1 + this.below(4), this.next() < 0.5 ? -1 : 1];
      const lines = locations.map((location, i) => ({
        sku,
        location,
        quantity: i === 0 ? back * quantity : -back * quantity,
      }));
      return { kind, id, about, ttlMs: undefined, lines };
    }
    return { kind, id, about, ttlMs: undefined, lines: this.#some(() => this.below(12) - 7) };
  }

  #some(quantity: () => number): OrderLine[] {
    for (;;) {
      const lines = this.lines(quantity);
      if (lines.length > 0) return lines;
    }
  }

  /** Ids come once in a batch. */
  orders(): StockOrder[] {
    const orders = Array.from({ length: this.next() < 0.5 ? 1 : 1 + this.below(4) }, () =>
      // Some of them once more.
      this.#orders.length > 0 && this.next() < 0.2 ? this.one(this.#orders) : this.order(),
    );
    this.#orders.push(...orders);
    return orders.filter(({ id }, i) => orders.findIndex((other) => other.id === id) === i);
  }

  sequel(state: State): Sequel {
    if (this.#sequels.length > 0 && this.next() < 0.2) return this.one(this.#sequels);
    const sequel = this.#sequel(state);
    this.#sequels.push(sequel);
    return sequel;
  }

  #sequel({ levels, movements, reservations }: State): Sequel {
    const kind = this.one(["commit", "release", "return", "return"] as const);
    if (kind !== "return") {
      const of = this.next() < 0.9 ? (this.one(reservations)?.id ?? "r 0") : "nowhere";
      const about = this.next() < 0.5 ? { ...this.about(), source: "" } : this.about();
      return { kind, id: `${kind}:${of}`, of, about, lines: undefined };
    }
    const sales = movements.filter(({ quantity }) => quantity < 0);
    const of = this.next() < 0.9 ? (this.one(sales)?.external_id ?? "m 0") : "nowhere";
    const whole = this.next() < 0.4;
    return {
      kind,
      id: whole ? `return:${of}` : this.id("b"),
      of,
      about: { ...this.about(), source: "RETURN" },
      lines: whole
        ? undefined
        : this.#returned(
            levels,
            sales.filter((row) => row.external_id === of),
          ),
    };
  }

  /** Some of what was sold, or a little more; or whatever. */
  #returned(levels: readonly LevelRow[], sold: readonly MovementRow[]): OrderLine[] {
    const lines = sold
      .filter(() => this.next() < 0.7)
      .map(({ level, quantity }) => {
        const { sku, location } = levels.find(({ id }) => id === level) as LevelRow;
        return { sku, location, quantity: 1 + this.below(1 - quantity) };
      });
    return lines.length > 0 && this.next() < 0.8
      ? lines.toSorted(compareSpots)
      : this.#some(() => 1 + this.below(3));
  }
}

const expired = "clock_timestamp() - interval '1 hour'";

/** What calls alone do not do: time goes by, clocks differ, people write where they should not. */
async function disturb(client: PoolClient, player: Player, state: State): Promise<void> {
  const row = player.one(state.reservations);
  if (!row) return;
  switch (player.below(3)) {
    case 0:
      await client.query(`UPDATE holdfast.stock_reserved SET until = ${expired} WHERE reservation = $1`, [
        row.id,
      ]);
      await client.query(`UPDATE holdfast.stock_reservation SET until = ${expired} WHERE id = $1`, [row.id]);
      break;
    case 1:
      // Somebody whose clock was ahead has cleared away one of its lines.
      await client.query(
        `WITH gone AS (DELETE FROM holdfast.stock_reserved WHERE reservation = $1 AND level = $2 RETURNING level, quantity)
         UPDATE holdfast.stock_level t SET reserved = reserved - gone.quantity FROM gone WHERE t.id = gone.level`,
        [row.id, row.levels[0]],
      );
      break;
    default:
      // A gap, or a level that was changed behind the movements' back.
      await client.query("DELETE FROM holdfast.stock_movement WHERE level = $1 AND version % 7 = 3", [
        row.levels[0],
      ]);
      await client.query("UPDATE holdfast.stock_level SET on_hand = on_hand + 1 WHERE id = $1", [
        row.levels[0],
      ]);
  }
}

function linesOf(state: State, sequel: Sequel): StockCall | string {
  const spots = new Map(state.levels.map((row) => [row.id, row]));
  if (sequel.kind !== "return")
    return (
      ofReservation(
        sequel,
        state.reservations.find(({ id }) => id === sequel.of),
        spots,
      ) ?? "unknown"
    );
  const sales = state.movements
    .filter(
      ({ external_id, quantity, kind }) =>
        external_id === sequel.of && quantity < 0 && ["apply", "commit"].includes(kind),
    )
    .map(({ level, quantity }) => ({
      ...(spots.get(level) as LevelRow),
      sold: -quantity,
      back: state.movements
        .filter((row) => row.origin === sequel.of && row.level === level && row.external_id !== sequel.id)
        .reduce((sum, row) => sum + row.quantity, 0),
    }));
  return ofSale(sequel, sales);
}

class Trial {
  readonly store: StockStore<SqlConnection>;
  readonly client: PoolClient;
  readonly connection: SqlConnection;
  readonly player: Player;
  readonly outcomes = new Map<string, number>();
  hint = "";

  constructor(database: Database<PoolClient, SqlConnection>, client: PoolClient, player: Player) {
    this.store = database.engine.stock as StockStore<SqlConnection>;
    this.client = client;
    this.connection = database.join(client);
    this.player = player;
  }
}

function compare(
  trial: Trial,
  call: unknown,
  verdicts: readonly OrderVerdict[],
  found: readonly OrderVerdict[],
  after: State,
  state: State,
): void {
  const text = `${trial.hint}: ${JSON.stringify(call)}`;
  expect(found.map(said), text).toEqual(verdicts.map(said));
  expect(state, text).toEqual(after);
  for (const { outcome } of verdicts) trial.outcomes.set(outcome, (trial.outcomes.get(outcome) ?? 0) + 1);
}

async function playOrders(trial: Trial, state: State, orders: readonly StockOrder[]): Promise<void> {
  const verdicts =
    (await trial.store.decide(trial.connection, book, orders, { ...how, make: true, look: true })) ?? [];
  const after = await stateOf(trial.client);
  // By the moment that the server took: of what was done before, the moment is that of then.
  const told = verdicts.filter(({ outcome }) => outcome !== "before").map(({ at }) => Math.round(at * 1000));
  const calls = orders.map((order) => ({ ...order, of: order.kind === "reserve" ? order.id : undefined }));
  const found = decided(state, after, told[0] ?? Date.now() * 1000, calls, (view) => decide(view, calls));
  compare(trial, orders, verdicts, found.verdicts, after, found.state);
}

async function playSequel(trial: Trial, state: State, sequel: Sequel): Promise<void> {
  const verdict = await trial.store.follow(trial.connection, book, sequel, how);
  const after = await stateOf(trial.client);
  // Of what moved before, the moment of then: nothing depends on it then.
  const at = verdict.at > 0 ? Math.round(verdict.at * 1000) : Date.now() * 1000;
  const call = linesOf(state, sequel);
  if (typeof call === "string") {
    expect([call, after], `${trial.hint}: ${JSON.stringify(sequel)}`).toEqual([verdict.outcome, state]);
    return;
  }
  const found = decided(state, after, at, [call], (view) => decide(view, [call]));
  compare(trial, sequel, [verdict], found.verdicts, after, found.state);
}

async function playMinimum(trial: Trial, state: State): Promise<void> {
  const { player } = trial;
  const spot = { sku: player.one(skus), location: player.one(locations) };
  const min = player.below(9) - 5;
  const verdict = await trial.store.minimum(trial.connection, book, spot, min, how);
  const after = await stateOf(trial.client);
  const found = decided(state, after, Date.now() * 1000, [], (view) => decideMinimum(view, spot, min));
  compare(
    trial,
    { ...spot, min },
    [{ ...verdict, at: 0 }],
    [{ ...found.verdicts, at: 0 }],
    after,
    found.state,
  );
}

/** What the movements come to, and what a repair makes of it. */
async function playUpkeep(trial: Trial, state: State): Promise<void> {
  const { player } = trial;
  const page = { sku: undefined, location: undefined, after: undefined, most: 100 };
  const facts = await trial.store.upkeep.facts(trial.connection, book, page, how);
  const ledgers = new Map(
    state.levels.map((level) => [
      level,
      extend(
        emptyLedger,
        state.movements.filter((row) => row.level === level.id),
      ),
    ]),
  );
  const open = (level: LevelRow) =>
    state.reserved.filter((row) => row.level === level.id).reduce((sum, { quantity }) => sum + quantity, 0);
  const own = [...ledgers].map(([level, ledger]) => factsOf(level, ledger, open(level)));
  expect(own.toSorted(compareSpots), trial.hint).toEqual(facts);
  const [level, ledger] = player.one([...ledgers]);
  const trust = player.one(["ledger", "levels"] as const);
  const repair = { id: player.id("repair"), trust, about: player.about() };
  if (state.movements.some((row) => row.external_id === repair.id && row.level === level.id)) return;
  const failed = await Promise.resolve(
    trial.store.upkeep.repair(trial.connection, book, level, repair, how),
  ).catch((error: unknown) => error);
  const after = await stateOf(trial.client);
  const at = after.movements.find((row) => row.external_id === repair.id && row.level === level.id)?.at ?? 0;
  const decision = () => decideRepair(level, ledger, open(level), at, repair);
  const text = `${trial.hint}: ${JSON.stringify({ ...repair, level })}`;
  if (failed) {
    // In the same words.
    expect(decision, text).toThrow((failed as Error).message);
    return;
  }
  const { level: mended, movement } = decision();
  const writes = { levels: [{ before: level, after: mended }], movements: [movement], until: undefined };
  const none = { reservations: { insert: [], update: [] }, reserved: { insert: [], delete: [] } };
  expect(written(state, { ...writes, ...none }), text).toEqual(after);
}

const everyLevel = skus.flatMap((sku, i) =>
  locations.map((location, j): LevelRow => ({
    id: 1 + i * locations.length + j,
    book: book.name,
    sku,
    location,
    on_hand: 0,
    reserved: 0,
    min_level: 0,
    version: 0,
    elsewhere: false,
  })),
);

/** A stock that is kept here, and decides by itself: calls by one clock that goes on. */
class Memory {
  state: State = { levels: everyLevel, movements: [], reservations: [], reserved: [] };
  at = 1_700_000_000_000_000;

  decide(calls: readonly StockCall[]): readonly OrderVerdict[] {
    const { verdicts, state } = decided(this.state, this.state, this.at, calls, (view) =>
      decide(view, calls),
    );
    this.state = state;
    return verdicts;
  }

  follow(sequel: Sequel): OrderVerdict | undefined {
    const call = linesOf(this.state, sequel);
    return typeof call === "string" ? undefined : this.decide([call])[0];
  }
}

const callsOf = (orders: readonly StockOrder[]): StockCall[] =>
  orders.map((order) => ({ ...order, of: order.kind === "reserve" ? order.id : undefined }));

/** What is true after any calls. */
function checkState({ levels, movements, reserved }: State, hint: string): void {
  for (const level of levels) {
    const own = movements.filter((row) => row.level === level.id);
    const ledger = extend(emptyLedger, own);
    const open = reserved.filter((row) => row.level === level.id).reduce((sum, row) => sum + row.quantity, 0);
    expect(addsUp(factsOf(level, ledger, open)), `${hint}: ${JSON.stringify(level)}`).toBe(true);
    expect(level.on_hand - level.reserved, hint).toBeGreaterThanOrEqual(level.min_level);
    expect(new Set(own.map((row) => row.external_id)).size, hint).toBe(own.length);
    for (const row of own.filter(({ origin }) => origin !== undefined)) {
      const back = own
        .filter(({ origin }) => origin === row.origin)
        .reduce((sum, each) => sum + each.quantity, 0);
      const sold = own.find(({ external_id }) => external_id === row.origin)?.quantity ?? 0;
      expect(back, hint).toBeLessThanOrEqual(-sold);
    }
  }
}

describe("the decision", () => {
  test.for(Array.from({ length: seeds * 5 }, (_, i) => i))("adds up, seed + %i", (i) => {
    const seed = inject("seed") + i;
    const player = new Player(seed);
    const [together, apart] = [new Memory(), new Memory()];
    for (let step = 0; step < 200; step++) {
      const hint = `HOLDFAST_SEED=${seed}, step ${step}`;
      // A batch is its calls one after the other.
      together.at = apart.at += player.below(600_000_000);
      if (player.next() < 0.3) {
        const sequel = player.sequel(together.state);
        expect(apart.follow(sequel), hint).toEqual(together.follow(sequel));
      } else {
        const calls = callsOf(player.orders());
        const verdicts = together.decide(calls);
        expect(
          calls.flatMap((call) => apart.decide([call])),
          hint,
        ).toEqual(verdicts);
        // Once more, at once: what was done before, with the same answer; what was refused, as it was.
        const before = together.state;
        const again = together.decide(calls);
        // What has run out may be cleared away only now.
        if (again.every(({ outcome }) => outcome !== "done"))
          expect(together.state.movements, hint).toEqual(before.movements);
        for (const [n, verdict] of verdicts.entries())
          if (verdict.outcome === "done" && calls[n]?.kind !== "reserve")
            expect(said(again[n] as OrderVerdict), hint).toEqual(said({ ...verdict, outcome: "before" }));
        apart.state = structuredClone(together.state);
      }
      checkState(together.state, hint);
    }
  });

  test("a reservation is over at its very moment", () => {
    const memory = new Memory();
    const about: MovementAbout = {
      source: "ORDER",
      referenceType: undefined,
      referenceId: undefined,
      by: undefined,
      note: undefined,
    };
    const line = { sku: "A", location: "main", quantity: 3 };
    const order = (kind: StockOrder["kind"], id: string, quantity: number) =>
      memory.decide(callsOf([{ kind, id, about, ttlMs: 1, lines: [{ ...line, quantity }] }]))[0]?.outcome;
    const commit = () => memory.follow({ kind: "commit", id: "commit:r", of: "r", about, lines: undefined });
    expect(order("apply", "restock", 3)).toBe("done");
    expect(order("reserve", "r", 3)).toBe("done");
    memory.at += 999;
    expect(order("apply", "sale", -1)).toBe("short");
    memory.at += 1;
    expect(commit()).toMatchObject({ outcome: "ended", state: "expired" });
    expect(order("apply", "sale", -1)).toBe("done");
    checkState(memory.state, "");
  });

  test("lines that another clock has cleared away end a reservation, and what is left of it is free", () => {
    const memory = new Memory();
    const about: MovementAbout = {
      source: "ORDER",
      referenceType: undefined,
      referenceId: undefined,
      by: undefined,
      note: undefined,
    };
    const lines = ["A", "B"].map((sku) => ({ sku, location: "main", quantity: 3 }));
    memory.decide(callsOf([{ kind: "apply", id: "restock", about, ttlMs: undefined, lines }]));
    memory.decide(callsOf([{ kind: "reserve", id: "r", about, ttlMs: 60_000, lines }]));
    const [first, ...levels] = memory.state.levels;
    memory.state = {
      ...memory.state,
      levels: [{ ...(first as LevelRow), reserved: 0 }, ...levels],
      reserved: memory.state.reserved.filter(({ level }) => level !== first?.id),
    };
    const verdict = memory.follow({ kind: "commit", id: "commit:r", of: "r", about, lines: undefined });
    expect(verdict).toMatchObject({ outcome: "ended", state: "expired" });
    expect(memory.state.reserved).toEqual([]);
    expect(memory.state.reservations).toMatchObject([{ state: "open", until: memory.at }]);
    checkState(memory.state, "");
  });
});

async function within<T>(
  body: (trial: (seed: number) => Trial, client: PoolClient) => Promise<T>,
): Promise<T> {
  const database = await createDatabase("postgres");
  const pool = new Pool({ connectionString: database.url, max: 3 });
  try {
    const client = fromPg(pool);
    await holdfast(fromPg(pool)).migrate();
    const own = await pool.connect();
    try {
      return await body((seed) => new Trial(client, own, new Player(seed)), own);
    } finally {
      own.release();
    }
  } finally {
    await pool.end();
    await database.drop();
  }
}

describe("the functions decide as the decision does", () => {
  test.for(Array.from({ length: seeds }, (_, i) => i))("seed + %i", { timeout: 300_000 }, async (i) => {
    const seed = inject("seed") + i;
    await within(async (start, client) => {
      const trial = start(seed);
      const { player } = trial;
      for (let step = 0; step < steps; step++) {
        trial.hint = `HOLDFAST_SEED=${seed}, step ${step}`;
        if (player.next() < 0.15) await disturb(client, player, await stateOf(client));
        const state = await stateOf(client);
        const what = player.next();
        if (step < 3 || what < 0.65) await playOrders(trial, state, player.orders());
        else if (what < 0.88) await playSequel(trial, state, player.sequel(state));
        else if (what < 0.95) await playMinimum(trial, state);
        else if (state.levels.length > 0) await playUpkeep(trial, state);
      }
      // Not all of one kind: else little was compared.
      expect([...trial.outcomes.keys()].toSorted(), JSON.stringify([...trial.outcomes])).toEqual(
        expect.arrayContaining(["before", "conflict", "done", "short"]),
      );
    });
  });
});
