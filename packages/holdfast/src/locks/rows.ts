/** Row and table locks: what is asked for is checked, put into one order, and taken. The SQL is the engine's. */
import { shown } from "../seam/shown.ts";
import { type Capabilities, type Support, require } from "../seam/capabilities.ts";
import type { Connection, Reason, Row, Wait } from "../seam/database.ts";
import {
  LockNotAvailableError,
  LockTimeoutError,
  RowsMissingError,
  SerializationError,
  UnsupportedError,
  UsageError,
  shownKey,
} from "../seam/errors.ts";
import { emit, traced } from "../events/events.ts";
import { boundedBy } from "../waiting/interrupt.ts";
import type { Lockable } from "../seam/key.ts";
import { checkNames, checkSignal } from "../input/options.ts";
import {
  type AllOptions,
  type LockedRows,
  type QueryOptions,
  type RowKey,
  type RowLocker,
  type RowOptions,
  RowsItem,
  type TableName,
  type TableOptions,
  tableName,
} from "../seam/row-options.ts";
import type { InstanceContext, Scope, Work } from "../transaction/scope.ts";
import type { CallSite } from "../context/call-site.ts";
import { type Identifier, isStatement } from "../seam/sql.ts";
import {
  type RowOrder,
  type RowCall,
  type RowStrength,
  type RowSelection,
  type TableMode,
  type TableShape,
  type Tables,
  type Where,
  type Which,
  rowStrengths,
  tableModes,
} from "../seam/tables.ts";
import { checkWait } from "../waiting/wait.ts";

const rowNames = new Set(["for", "wait", "columns", "orderBy", "limit", "key", "missing", "signal"]);
const itemNames = new Set(["for", "columns", "orderBy", "limit", "key", "missing"]);
const queryNames = new Set(["for", "wait", "signal"]);
const waitNames = new Set(["wait", "signal"]);

/** A table that was made anew with another key is noticed after this long at the latest. */
const shapeMs = 60_000;
/** The server's own timeout comes first where it can; ours is for what it does not count. */
const slackMs = 100;

type Answer = { readonly granted: true } | { readonly granted: false; readonly reason: Reason };

function waited<A extends Answer>(kind: "rows" | "table", table: string, ask: () => Promise<A>): Promise<A> {
  return traced(
    "holdfast:lock",
    () => ({ kind, locks: [table] }),
    async (told) => {
      const answer = await ask();
      if (told) told.outcome = answer.granted ? "granted" : answer.reason;
      return answer;
    },
  );
}

/** What a call asks for, before the table is known. */
interface Wish {
  readonly call: string;
  readonly table: Identifier;
  readonly which: readonly unknown[] | Where;
  readonly strength: RowStrength;
  readonly columns: readonly string[] | undefined;
  readonly orderBy: readonly RowOrder[];
  readonly limit: number | undefined;
  readonly key: readonly string[] | undefined;
  readonly report: boolean;
}

export class Rows<Native, C extends Connection> implements RowLocker<Scope<Native, C>, C> {
  readonly #context: () => InstanceContext<Native, C>;
  /** What the catalog says, and when it was asked. */
  readonly #shapes = new Map<string, { shape: TableShape; at: number }>();

  constructor(context: () => InstanceContext<Native, C>) {
    this.#context = context;
  }

  async rows(
    scope: Scope<Native, C>,
    table: TableName,
    which: readonly unknown[] | Where,
    options: RowOptions,
  ): Promise<LockedRows<object>> {
    const site = scope.locking();
    checkNames("tx.rows", options, rowNames);
    checkSignal(options.signal);
    const wish = checkWish("tx.rows", table, which, options);
    const wait = this.#patience(options.wait, true);
    return scope.work(async (work) => {
      const call = await this.#call(work, wish, wait);
      return this.#lock(work, wish, call, site).catch(async (error: unknown) => {
        // The table may have got a column since the catalog was asked. Nothing has been sent yet.
        if (!(error instanceof UsageError)) throw error;
        return this.#lock(work, wish, await this.#call(work, wish, wait, true), site);
      });
    }, options.signal);
  }

  async query(scope: Scope<Native, C>, query: object, options: QueryOptions): Promise<unknown> {
    checkNames("tx.rows", options, queryNames);
    checkSignal(options.signal);
    const wait = this.#patience(options.wait, true);
    const strength = checkStrength("tx.rows", options.for);
    const { database } = this.#context();
    const started = performance.now();
    const table = "a query";
    const site = scope.locking();
    const found = await scope.work(async ({ connection, capabilities, joined }) => {
      this.#assertStrength(capabilities, strength);
      const run = database.locking?.(scope.client, query, {
        strength,
        wait: typeof wait === "number" ? "bounded" : wait,
      });
      if (!run)
        throw new UsageError(
          database.locking
            ? `tx.rows(query): this is no query of a builder of ${database.traits.client}`
            : `tx.rows(query): ${database.traits.client} has no query builder. Name a table: tx.rows("account", [1, 2]).`,
        );
      const around = this.#tables.around?.bind(this.#tables);
      if (!around)
        throw new UnsupportedError(
          `tx.rows(query): its waits cannot be bounded on ${database.engine.name}. Name a table: tx.rows("account", [1, 2]).`,
        );
      return waited("rows", table, () => around(connection, { wait, joined, capabilities }, run));
    }, options.signal);
    const waitedMs = Math.round(performance.now() - started);
    if (found.granted) {
      const rows = Array.isArray(found.value) ? found.value.length : 0;
      scope.section?.took({ kind: "rows", name: table, shared: isShared(strength) }, site);
      emit("holdfast:rows:locked", () => ({ table, rows, waitedMs }));
      return found.value;
    }
    emit("holdfast:rows:refused", () => ({ table, waitedMs, reason: found.reason }));
    const blocked = { keys: ["rows of a query"], holders: [] };
    if (found.reason === "busy") throw new LockNotAvailableError(blocked, found.usable);
    throw new LockTimeoutError({ ...blocked, waitedMs }, found.cause, found.usable);
  }

  #assertStrength(capabilities: Capabilities, strength: RowStrength): void {
    const strengths = require(capabilities.rowLocks, "Row locks");
    if (!strengths.includes(strength))
      throw new UnsupportedError(`Row locks for "${strength}": here there are ${strengths.join(", ")}`);
  }

  async all(
    scope: Scope<Native, C>,
    items: readonly (Lockable | RowsItem<any>)[],
    options: AllOptions,
  ): Promise<unknown[]> {
    const site = scope.locking();
    checkNames("tx.lockAll", options, waitNames);
    checkSignal(options.signal);
    if (!Array.isArray(items) || items.length === 0)
      throw new UsageError("tx.lockAll takes a list of keys and rows(…), and this one is empty");
    const wait = this.#patience(options.wait, false) as Wait;
    const until = performance.now() + (wait === "nowait" ? 0 : wait);
    const left = (): Wait => (wait === "nowait" ? wait : Math.max(1, Math.ceil(until - performance.now())));
    const locks = items.filter((item): item is Lockable => !(item instanceof RowsItem));
    const wishes = items.flatMap((item, index) =>
      item instanceof RowsItem ? [{ index, wish: checkItem(item) }] : [],
    );
    // Keys before rows, tables by name, rows by key: the same for everybody.
    if (locks.length > 0) await scope.lock(locks, { wait, signal: options.signal });
    const results: unknown[] = items.map(() => undefined);
    if (wishes.length === 0) return results;
    return scope.work(async (work) => {
      const calls: { index: number; wish: Wish; call: RowCall }[] = [];
      for (const { index, wish } of wishes)
        // Which table a name without a schema means can differ from one transaction to the next, and order hangs on it.
        calls.push({ index, wish, call: await this.#call(work, wish, wait, wish.table.path.length === 1) });
      const byTable = Map.groupBy(calls, ({ call }) => call.shape.name);
      for (const [, group] of [...byTable].toSorted(([a], [b]) => (a < b ? -1 : 1))) {
        const found = await this.#together(
          work,
          group.map(({ wish, call }) => ({ wish, call: { ...call, wait: left() } })),
          site,
        );
        group.forEach(({ index }, i) => (results[index] = found[i]));
      }
      return results;
    }, options.signal);
  }

  /** Items about one table are locked as one: one after the other they would be in no order. */
  async #together(
    work: Work<C>,
    group: readonly { wish: Wish; call: RowCall }[],
    site: CallSite | undefined,
  ): Promise<LockedRows<object>[]> {
    const [only, ...others] = group;
    if (!only) return [];
    if (others.length === 0) return [await this.#lock(work, only.wish, only.call, site)];
    const { shape, key } = only.call;
    const keyLists = group.map(({ call: { which, key: columns } }) => {
      if (!("keys" in which) || String(columns) !== String(key)) {
        throw new UsageError(
          `tx.lockAll: there are several rows(…) of ${shape.name}. Name their rows by keys, or put the conditions into one: ` +
            `one after the other they would be locked in no order.`,
        );
      }
      return which.keys;
    });
    const strength = rowStrengths.find((each) => group.some(({ call }) => call.strength === each));
    const all: RowCall = { ...only.call, which: { keys: keyLists.flat() }, strength, columns: key };
    await this.#select(work, all, site);
    // Locked by now: each item reads its own, in its own columns.
    const results: LockedRows<object>[] = [];
    for (const { wish, call } of group)
      results.push(await this.#lock(work, wish, { ...call, strength }, site));
    return results;
  }

  async table(
    scope: Scope<Native, C>,
    name: TableName,
    mode: TableMode,
    options: TableOptions,
  ): Promise<void | boolean> {
    const site = scope.locking();
    checkNames("tx.table", options, waitNames);
    checkSignal(options.signal);
    const table = tableName(name, "tx.table");
    if (!tableModes.includes(mode))
      throw new UsageError(
        `tx.table: the mode must be one of ${tableModes.map((m) => `"${m}"`).join(", ")}, not ${JSON.stringify(mode)}`,
      );
    const skip = options.wait === "skip";
    const wait = skip ? "nowait" : (this.#patience(options.wait, false) as Wait);
    const shown = `table ${table.path.join(".")}`;
    const started = performance.now();
    const locked = { kind: "table", name: table.path.join(".") } as const;
    const grant = await scope.work(async ({ connection, capabilities, joined, signal, section }) => {
      const modes = require(capabilities.tableLocks, "Table locks");
      if (!modes.includes(mode))
        throw new UnsupportedError(`A table lock "${mode}": here there are ${modes.join(", ")}`);
      if (wait !== "nowait") section?.asks(locked, site);
      return waited("table", table.path.join("."), () =>
        this.#tables.lock(connection, { table, mode, wait, joined, capabilities, signal }),
      );
    }, options.signal);
    const waitedMs = Math.round(performance.now() - started);
    if (grant.granted) {
      scope.section?.took(locked, site);
      emit("holdfast:table:locked", () => ({ table: table.path.join("."), mode, waitedMs }));
      return skip ? true : undefined;
    }
    const { reason } = grant;
    emit("holdfast:table:refused", () => ({ table: table.path.join("."), mode, waitedMs, reason }));
    if (skip) return false;
    const blocked = { keys: [`${shown} (${mode})`], holders: [] };
    if (grant.reason === "busy") throw new LockNotAvailableError(blocked);
    throw new LockTimeoutError({ ...blocked, waitedMs }, grant.cause);
  }

  get #tables(): Tables<C> {
    return this.#context().database.engine.tables as Tables<C>;
  }

  #patience(wait: Wait | "skip" | undefined, skip: boolean): Wait | "skip" {
    if (skip && wait === "skip") return wait;
    return wait === undefined ? this.#context().wait : checkWait(wait, "wait", skip ? ['"skip"'] : []);
  }

  async describe(
    { connection, capabilities }: Pick<Work<C>, "connection" | "capabilities">,
    table: Identifier,
    what: string,
    support: (capabilities: Capabilities) => Support<unknown>,
    fresh = false,
  ): Promise<TableShape> {
    require(support(capabilities), what);
    const name = table.path.join(".");
    const known = this.#shapes.get(JSON.stringify(table.path));
    if (known && !fresh && performance.now() - known.at < shapeMs) return known.shape;
    const shape = await this.#tables.describe(connection, table);
    if (!shape) {
      throw new UsageError(
        `${what}: there is no table ${name} that this connection can see. For another schema write "schema.table", for a name with a dot in it sql.id("the.name").`,
      );
    }
    this.#shapes.set(JSON.stringify(table.path), { shape, at: performance.now() });
    return shape;
  }

  async #call(work: Work<C>, wish: Wish, wait: Wait | "skip", fresh = false): Promise<RowCall> {
    const { capabilities, joined, signal } = work;
    const { table, strength } = wish;
    const shape = await this.describe(work, table, "Row locks", (c) => c.rowLocks, fresh);
    this.#assertStrength(capabilities, strength);
    const key = wish.key ?? shape.key;
    if (key.length === 0) {
      throw new UsageError(
        `${wish.call}: ${shape.name} has no primary key, so its rows have no order to be locked in. Name columns that are unique together: { key: […] }.`,
      );
    }
    const { columns, orderBy, limit } = wish;
    return {
      table,
      shape,
      key,
      which: which(wish, shape, key),
      strength,
      wait,
      columns,
      orderBy,
      limit,
      joined,
      capabilities,
      signal,
    };
  }

  async #lock(
    work: Work<C>,
    wish: Wish,
    call: RowCall,
    site: CallSite | undefined,
  ): Promise<LockedRows<object>> {
    for (let attempt = 1; ; attempt++) {
      const rows = await this.#select(work, call, site);
      if (!("keys" in call.which) || !rows.includes(undefined))
        return arranged(wish, call.shape, rows, new Set());
      const there = await this.#tables.present(work.connection, call);
      const replaced = rows.some((row, i) => row === undefined && there.has(i));
      if (call.wait === "skip" || !replaced)
        return arranged(wish, call.shape, rows, call.wait === "skip" ? there : new Set());
      // Who held the row has deleted it and made another with its key. Of several, some are locked already: to lock
      // an earlier one now would be out of order.
      if (call.which.keys.length > 1 || attempt >= 5)
        throw new SerializationError(
          `While rows of ${call.shape.name} were waited for, one of them was deleted and made anew. Run the transaction again.`,
        );
    }
  }

  /**
   * A server may count its timeout for each row anew, and not at all while it waits for a lock on the whole table. For
   * rows named by keys, which are found at once, the clock of this process is a second bound. (A condition may take
   * long by itself.)
   */
  async #bounded(connection: C, call: RowCall): Promise<RowSelection> {
    const { wait, which: chosen } = call;
    const run = () => this.#tables.select(connection, call);
    if (typeof wait !== "number" || !("keys" in chosen) || !connection.cancel) return run();
    const done = await boundedBy(connection, wait + slackMs, run);
    return done?.value ?? { granted: false, reason: "timeout", usable: false };
  }

  async #select(
    work: Work<C>,
    call: RowCall,
    site: CallSite | undefined,
  ): Promise<readonly (Row | undefined)[]> {
    const { connection, section } = work;
    const { shape, which: chosen } = call;
    if ("keys" in chosen && chosen.keys.length === 0) return [];
    const context = this.#context();
    const locked = { kind: "rows", name: shape.name, shared: isShared(call.strength) } as const;
    if (call.wait !== "nowait" && call.wait !== "skip") section?.asks(locked, site);
    const started = performance.now();
    const asked = waited("rows", shape.name, () => this.#bounded(connection, call));
    const found = await asked.catch((error: unknown) => {
      // The table may have changed since the catalog was asked.
      this.#shapes.delete(JSON.stringify(call.table.path));
      throw error;
    });
    const waitedMs = Math.round(performance.now() - started);
    if (found.granted) {
      const count = () => found.rows.filter((row) => row !== undefined).length;
      section?.took(locked, site);
      emit("holdfast:rows:locked", () => ({ table: shape.name, rows: count(), waitedMs }));
      return found.rows;
    }
    emit("holdfast:rows:refused", () => ({ table: shape.name, waitedMs, reason: found.reason }));
    const ask = this.#tables.holders?.bind(this.#tables);
    const holders = ask ? await context.look((c) => ask(c, call), found.usable ? connection : undefined) : [];
    const blocked = { keys: [context.show(shownRows(call))], holders };
    const { usable } = found;
    if (found.reason === "busy") throw new LockNotAvailableError(blocked, usable);
    throw new LockTimeoutError({ ...blocked, waitedMs }, found.cause, usable);
  }
}

function shownRows({ shape, which: chosen }: RowCall): string {
  if (!("keys" in chosen)) return `rows of ${shape.name}`;
  const keys = chosen.keys.slice(0, 3).map((values) => values.map((value) => shownKey(value)).join(", "));
  const more = chosen.keys.length > 3 ? `; and ${chosen.keys.length - 3} more` : "";
  return `${shape.name}[${keys.join("; ")}${more}]`;
}

function checkItem({ table, which: chosen, options }: RowsItem<any>): Wish {
  checkNames("rows", options, itemNames);
  return checkWish("rows", table, chosen, options);
}

function isShared(strength: RowStrength | undefined): boolean {
  return strength === "share" || strength === "key share";
}

function checkStrength(call: string, strength: RowStrength = "update"): RowStrength {
  if (rowStrengths.includes(strength)) return strength;
  throw new UsageError(
    `${call}: \`for\` must be one of ${rowStrengths.map((s) => `"${s}"`).join(", ")}, not ${JSON.stringify(strength)}`,
  );
}

function checkWish(
  call: string,
  table: TableName,
  chosen: readonly unknown[] | Where,
  options: RowOptions,
): Wish {
  const { columns, limit, missing = "throw" } = options;
  const strength = checkStrength(call, options.for);
  if (missing !== "throw" && missing !== "report")
    throw new UsageError(`${call}: \`missing\` must be "throw" or "report", not ${JSON.stringify(missing)}`);
  if (limit !== undefined && !(Number.isSafeInteger(limit) && limit > 0))
    throw new UsageError(`${call}: \`limit\` must be a whole number above 0, not ${shown(limit)}`);
  if (columns !== undefined && (!Array.isArray(columns) || columns.length === 0))
    throw new UsageError(`${call}: \`columns\` must be a list of names with at least one in it`);
  const byKeys = Array.isArray(chosen);
  if (!byKeys && (typeof chosen !== "object" || chosen === null))
    throw new UsageError(
      `${call}: rows are named by a list of keys ([id]), an object ({ status: "open" }) or sql\`…\`, not by ${String(chosen)}`,
    );
  if (byKeys && (limit !== undefined || options.orderBy !== undefined))
    throw new UsageError(
      `${call}: rows named by keys come in the order of these: leave \`orderBy\` and \`limit\` out`,
    );
  if (!byKeys && !isStatement(chosen)) checkWhere(call, chosen as Readonly<Record<string, unknown>>);
  const key = options.key === undefined ? undefined : [options.key].flat();
  return {
    call,
    table: tableName(table, call),
    which: chosen,
    strength,
    columns,
    orderBy: order(call, options.orderBy),
    limit,
    key,
    report: missing === "report",
  };
}

function checkWhere(call: string, where: Readonly<Record<string, unknown>>): void {
  const entries = Object.entries(where);
  if (entries.length === 0)
    throw new UsageError(
      `${call}: the condition is empty, which would be every row: write sql\`true\` if that is meant`,
    );
  for (const [name, value] of entries) {
    const missing = value === undefined || (Array.isArray(value) && value.includes(undefined));
    if (missing)
      throw new UsageError(
        `${call}: \`${name}\` is undefined, which usually is a missing id. For NULL write null.`,
      );
    if (Array.isArray(value) && value.includes(null))
      throw new UsageError(
        `${call}: \`${name}\` is a list with null in it, which equals nothing. Write the condition as sql\`…\`.`,
      );
  }
}

function order(call: string, orderBy: RowOptions["orderBy"]): RowOrder[] {
  if (orderBy === undefined) return [];
  return [orderBy].flat().flatMap((item): RowOrder[] => {
    if (typeof item === "string") return [{ column: item, descending: false }];
    return Object.entries(item as Record<string, unknown>).map(([column, direction]) => {
      if (direction !== "asc" && direction !== "desc")
        throw new UsageError(`${call}: \`orderBy\` is "column" or { column: "asc" | "desc" }`);
      return { column, descending: direction === "desc" };
    });
  });
}

function which({ call, which: chosen }: Wish, shape: TableShape, key: readonly string[]): Which {
  if (!Array.isArray(chosen)) return { where: chosen as Where };
  return { keys: chosen.map((each) => keyValues(call, shape.name, key, each)) };
}

/** The values of a key, in the order of its columns. */
export function keyValues(call: string, table: string, key: readonly string[], given: unknown): unknown[] {
  const composite =
    typeof given === "object" && given !== null && !(given instanceof Date) && !(given instanceof Uint8Array);
  if (!composite && key.length > 1)
    throw new UsageError(
      `${call}: a row of ${table} is named by ${key.join(", ")}: write { ${key.map((name) => `${name}: …`).join(", ")} }`,
      "HF_BAD_KEY",
    );
  const values = composite ? key.map((name) => (given as Record<string, unknown>)[name]) : [given];
  if (composite) {
    const others = Object.keys(given).filter((name) => !key.includes(name));
    if (others.length > 0)
      throw new UsageError(
        `${call}: ${others.join(", ")} is not part of the key of ${table}, which is ${key.join(", ")}`,
        "HF_BAD_KEY",
      );
  }
  values.forEach((value, i) => {
    if (value === undefined || value === null || value === "" || Number.isNaN(value))
      throw new UsageError(
        `${call}: ${String(key[i])} of a key of ${table} is ${value === "" ? "empty" : String(value)}, which usually is a missing id`,
        "HF_BAD_KEY",
      );
  });
  return values;
}

function arranged(
  wish: Wish,
  shape: TableShape,
  rows: readonly (Row | undefined)[],
  there: ReadonlySet<number>,
): LockedRows<object> {
  const found = rows.filter((row) => row !== undefined);
  const absent = rows.flatMap((row, i) => (row === undefined ? [i] : []));
  const named = (i: number) => (wish.which as readonly RowKey[])[i] as RowKey;
  const missing = absent.filter((i) => !there.has(i)).map(named);
  if (missing.length > 0 && !wish.report) throw new RowsMissingError(shape.name, missing);
  // Hidden, so that a list of rows still looks like one when it is printed or compared.
  Object.defineProperties(found, {
    missing: { value: missing },
    skipped: { value: absent.filter((i) => there.has(i)).map(named) },
  });
  return found as unknown as LockedRows<object>;
}
