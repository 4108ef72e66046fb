/**
 * Prisma's `findMany`, with the rows locked. There is no second compiler for `where`: Prisma finds the keys, these are
 * locked in one order, and Prisma reads again with the same `where`, so that what no longer matches is not returned.
 */
import { isDeepStrictEqual } from "node:util";
import type { Connection, Wait } from "../../seam/database.ts";
import { SerializationError, UsageError } from "../../seam/errors.ts";
import type { RowKey } from "../../seam/row-options.ts";
import type { Scope } from "../../transaction/scope.ts";
import { Identifier } from "../../seam/sql.ts";
import type { RowStrength, TableShape } from "../../seam/tables.ts";

export interface PrismaLock {
  /** Default "update". */
  readonly mode?: RowStrength;
  /** Milliseconds; "nowait" to throw at once; "skip" to leave out what is locked. Default: the instance's (5 s). */
  readonly wait?: Wait | "skip";
}

type Values = Record<string, unknown>;

/** A model's delegate, as Prisma makes it. */
export interface Delegate {
  readonly $name: string;
  findMany(args: Values): PromiseLike<Values[]>;
  findFirst(args: Values): PromiseLike<Values | null>;
  findUnique(args: Values): PromiseLike<Values | null>;
  updateMany(args: Values): PromiseLike<{ readonly count: number }>;
}

/** What Prisma's generated client knows of the schema at run time. */
interface Model {
  readonly dbName?: string | null;
  readonly schema?: string | null;
  readonly fields: readonly { name: string; kind: string; type: string; dbName?: string }[];
}

export interface Schema {
  readonly _runtimeDataModel?: { readonly models: Readonly<Record<string, Model>> };
  readonly _engineConfig?: { readonly inlineSchema?: string };
}

/** A column of the primary key, and the field that stands for it. */
interface KeyField {
  readonly column: string;
  readonly field: string;
  /** As the engine names it. */
  readonly type: string;
  /** Names of an enum's values and what the database calls them, where they differ. */
  readonly labels: ReadonlyMap<string, string>;
}

type AnyScope = Scope<unknown, Connection>;

/** Where to look, and how. */
export interface FindPlace {
  readonly delegate: Delegate;
  readonly scope: AnyScope;
  readonly schema: Schema;
  /** Reads without a lock show the world as it was at the first of them, even of rows that were locked since. */
  readonly snapshot: boolean;
  /** The schema of models that do not name theirs, if it is not the connection's own. */
  readonly database?: string | undefined;
}

interface Target extends FindPlace {
  readonly table: Identifier;
  readonly shape: TableShape;
  readonly key: readonly KeyField[];
  readonly lock: PrismaLock;
}

async function targetOf(place: FindPlace, lock: PrismaLock): Promise<Target> {
  const { scope, schema, delegate, database } = place;
  const model = schema._runtimeDataModel?.models[delegate.$name];
  if (!model) throw new UsageError(`Prisma's client does not say what the model ${delegate.$name} is`);
  const within = model.schema ?? schemaNamed(schema, delegate.$name) ?? database;
  const table = new Identifier([...(within ? [within] : []), model.dbName ?? delegate.$name]);
  const shape = await scope.work((work) =>
    scope.context.rows.describe(work, table, `${delegate.$name}.find…ForUpdate`, (can) => can.rowLocks),
  );
  if (shape.key.length === 0)
    throw new UsageError(`${shape.name} has no primary key, so its rows have no order to be locked in`);
  const key = shape.key.map((column) => {
    const field = model.fields.find(({ name, dbName }) => (dbName ?? name) === column);
    if (!field)
      throw new UsageError(
        `The primary key of ${shape.name} has a column ${column}, which is no field of the model ${delegate.$name}`,
      );
    const type = shape.columns.get(column) ?? "";
    return {
      column,
      field: field.name,
      type,
      labels: field.kind === "enum" ? labels(schema, field.type) : none,
    };
  });
  return { ...place, table, shape, key, lock };
}

/** Prisma 6 has `@@schema` of a model in the schema's text only. */
function schemaNamed({ _engineConfig }: Schema, name: string): string | undefined {
  const text = _engineConfig?.inlineSchema ?? "";
  const body = new RegExp(`^\\s*model\\s+${name}\\s*\\{([^]*?)^\\s*\\}`, "m").exec(text)?.[1] ?? "";
  return /^\s*@@schema\("((?:[^"\\]|\\.)*)"\)/m.exec(body)?.[1];
}

const none: ReadonlyMap<string, string> = new Map();

/** `@map` of an enum's values is in the schema's text only. */
function labels({ _engineConfig }: Schema, type: string): ReadonlyMap<string, string> {
  const text = _engineConfig?.inlineSchema ?? "";
  const body = new RegExp(`^\\s*enum\\s+${type}\\s*\\{([^}]*)\\}`, "m").exec(text)?.[1] ?? "";
  return new Map(
    [...body.matchAll(/^\s*(\w+)\s+@map\("((?:[^"\\]|\\.)*)"\)/gm)].map(([, name, label]) => [
      name as string,
      label as string,
    ]),
  );
}

/** The key of a row as the database has it. */
function keyOf({ key }: Target, row: Values): Values {
  return Object.fromEntries(
    key.map(({ column, field, type, labels: known }) => {
      const value = row[field];
      if (typeof value === "string") return [column, known.get(value) ?? value];
      if (value instanceof Date) return [column, moment(value, type)];
      // Prisma's Decimal.
      return [column, isOpaque(value) ? String(value) : value];
    }),
  );
}

/** Prisma has a Date for each of them, in UTC. */
function moment(value: Date, type: string): Date | string {
  const text = value.toISOString();
  if (type === "date") return text.slice(0, 10);
  if (/^(timestamp|datetime)/.test(type))
    return /with time zone|timestamptz/.test(type) ? value : text.slice(0, -1);
  return type.startsWith("time") ? text.slice(11, -1) : value;
}

function isOpaque(value: unknown): boolean {
  return typeof value === "object" && value !== null && !(value instanceof Uint8Array);
}

/** Locks rows, and returns those that are locked now. */
async function lockRows(
  target: Target,
  found: readonly Values[],
  wait: PrismaLock["wait"] = target.lock.wait,
): Promise<Values[]> {
  const { scope, table, key } = target;
  const keys = found.map((row) => keyOf(target, row));
  const { mode = "update" } = target.lock;
  const locked = await scope.rows<Values>(table, keys as RowKey[] as never, {
    for: mode,
    ...(wait !== undefined && { wait }),
    columns: key.map(({ column }) => column),
    missing: "report",
  });
  const gone = new Set(
    [...locked.missing, ...locked.skipped].map((each) => identity(target, each as Values)),
  );
  const there = keys.filter((each) => !gone.has(identity(target, each)));
  if (target.snapshot && there.length > 0) await assertFresh(target, there, mode);
  return found.filter((_, i) => !gone.has(identity(target, keys[i] as Values)));
}

/** What Prisma is going to read must be what was locked. */
async function assertFresh(
  { scope, table, shape, key }: Target,
  rows: readonly Values[],
  mode: RowStrength,
): Promise<void> {
  const keys = rows.map((row) => key.map(({ column }) => row[column]));
  const read = (strength: RowStrength | undefined) =>
    scope.work(async ({ connection, capabilities, joined }) =>
      scope.context.database.engine.tables?.select(connection, {
        table,
        shape,
        key: key.map(({ column }) => column),
        which: { keys },
        strength,
        wait: "nowait",
        columns: undefined,
        orderBy: [],
        limit: undefined,
        joined,
        capabilities,
      }),
    );
  if (isDeepStrictEqual(await read(mode), await read(undefined))) return;
  throw new SerializationError(
    `Rows of ${shape.name} have changed since the first read of this transaction, whose snapshot does not show it. Open it as READ COMMITTED, or run it again.`,
  );
}

function identity({ key }: Target, row: Values): string {
  return JSON.stringify(key.map(({ column }) => String(row[column])));
}

/** Alternatives cost Prisma more than values: of the key's columns the one with the most values is a list. */
function these({ key }: Target, rows: readonly Values[]): Values {
  const values = (field: string) => new Set(rows.map((row) => String(row[field]))).size;
  const [longest, ...others] = key.map(({ field }) => field).toSorted((a, b) => values(b) - values(a)) as [
    string,
    ...string[],
  ];
  const groups = Map.groupBy(rows, (row) => JSON.stringify(others.map((field) => String(row[field]))));
  const alternatives = [...groups.values()].map((group) => ({
    ...Object.fromEntries(others.map((field) => [field, group[0]?.[field]])),
    [longest]: { in: group.map((row) => row[longest]) },
  }));
  return alternatives.length === 1 ? (alternatives[0] as Values) : { OR: alternatives };
}

function selected({ key }: Target): Values {
  return Object.fromEntries(key.map(({ field }) => [field, true]));
}

/** What says which rows there are, and not what is read of them. */
const choosing = ["where", "orderBy", "take", "skip", "cursor", "distinct"];

function only(args: Values, names: readonly string[]): Values {
  return Object.fromEntries(Object.entries(args).filter(([name]) => names.includes(name)));
}

export interface FindArgs extends Values {
  readonly lock?: PrismaLock;
}

/** How many rows Prisma is told of in one statement: there is a limit of values, and each alternative costs it 0.3 ms. */
const most = { one: 5000, several: 1000 };

/** Reads rows that are locked, of those that still match, in the order in which they were found. */
async function read(target: Target, args: Values, locked: readonly Values[]): Promise<Values[]> {
  const { delegate, key } = target;
  const { take: _take, skip: _skip, cursor: _cursor, distinct: _distinct, where, ...rest } = args;
  const size = key.length === 1 ? most.one : most.several;
  if (locked.length <= size)
    return [...(await delegate.findMany({ ...rest, where: both(where, these(target, locked)) }))];
  const { asked, shown } = withKey(target, rest);
  const found = new Map<string, Values>();
  for (let from = 0; from < locked.length; from += size) {
    const some = locked.slice(from, from + size);
    for (const row of await delegate.findMany({ ...asked, where: both(where, these(target, some)) }))
      found.set(identity(target, keyOf(target, row)), shown(row));
  }
  return locked.flatMap((row): Values[] => {
    const now = found.get(identity(target, keyOf(target, row)));
    return now ? [now] : [];
  });
}

/** Of what is read in parts the order is ours to make: the key is asked for too, and left out again. */
function withKey({ key }: Target, args: Values): { asked: Values; shown: (row: Values) => Values } {
  const { select, omit } = args as { select?: Values; omit?: Values };
  const extra = key.map(({ field }) => field).filter((field) => (select ? !select[field] : omit?.[field]));
  if (extra.length === 0) return { asked: args, shown: (row) => row };
  const chosen = Object.fromEntries(extra.map((field) => [field, select !== undefined]));
  return {
    asked: { ...args, ...(select ? { select: { ...select, ...chosen } } : { omit: { ...omit, ...chosen } }) },
    shown: (row) => Object.fromEntries(Object.entries(row).filter(([name]) => !extra.includes(name))),
  };
}

export async function findManyLocked(
  place: FindPlace,
  { lock = {}, ...args }: FindArgs = {},
): Promise<Values[]> {
  const { delegate } = place;
  const target = await targetOf(place, lock);
  if (lock.wait === "skip" && typeof args["take"] === "number")
    return free(target, args, Math.abs(args["take"]), args["take"] < 0);
  const found = await delegate.findMany({ ...only(args, choosing), select: selected(target) });
  if (found.length === 0) return [];
  const locked = await lockRows(target, found);
  return locked.length === 0 ? [] : read(target, args, locked);
}

/** How many candidates are looked at for each one that is wanted, where others may have locked the first ones. */
const spare = { times: 4, more: 60 };

/**
 * The first ones that nobody has locked, and no more than are wanted: others would pass over those too. From the start
 * again with each larger look: what others finish meanwhile moves the rest up, out of sight of an offset.
 */
async function free(target: Target, args: Values, wanted: number, fromEnd: boolean): Promise<Values[]> {
  const { delegate } = target;
  const rows: Values[] = [];
  const seen = new Set<string>();
  for (let look = wanted * spare.times + spare.more; rows.length < wanted; look *= spare.times) {
    const candidates = await delegate.findMany({
      ...only(args, choosing),
      take: fromEnd ? -look : look,
      select: selected(target),
    });
    const fresh = candidates.filter((row) => !seen.has(identity(target, keyOf(target, row))));
    if (fromEnd) fresh.reverse();
    for (const row of fresh) seen.add(identity(target, keyOf(target, row)));
    for (let i = 0; i < fresh.length && rows.length < wanted;) {
      const some = fresh.slice(i, i + wanted - rows.length);
      i += some.length;
      const locked = await lockRows(target, some);
      if (locked.length === 0) continue;
      if (fromEnd) rows.unshift(...(await read(target, args, locked.toReversed())));
      else rows.push(...(await read(target, args, locked)));
    }
    if (candidates.length < look) break;
  }
  return rows;
}

/** Beside, not around: the name of a unique key is understood at the top of a `where` only. */
function both(where: unknown, more: Values): Values {
  const { AND = [], ...rest } = (where ?? {}) as Values;
  return { ...rest, AND: [AND, more].flat() };
}

/** Also where nobody is to be waited for. */
const leastAttempts = 10;

/** Somebody may have changed the row that was found before it could be locked: then another one may be the first. */
export async function findOneLocked(
  place: FindPlace,
  how: "findFirst" | "findUnique",
  { lock = {}, ...args }: FindArgs = {},
): Promise<Values | null> {
  const { delegate, scope } = place;
  const target = await targetOf(place, lock);
  if (how === "findFirst" && lock.wait === "skip") {
    const { take } = args as { take?: number };
    return (await free(target, args, 1, take !== undefined && take < 0))[0] ?? null;
  }
  const names = how === "findUnique" ? ["where"] : choosing;
  const patience = lock.wait ?? scope.context.wait;
  const until = performance.now() + (typeof patience === "number" ? patience : 0);
  for (let attempt = 1; ; attempt++) {
    const found = await delegate[how]({ ...only(args, names), select: selected(target) });
    if (!found) return null;
    const left = Math.max(1, Math.ceil(until - performance.now()));
    const locked = await lockRows(target, [found], typeof patience === "number" ? left : patience);
    // Skipped, and not to be waited for: nothing is there for this caller.
    if (locked.length === 0 && lock.wait === "skip") return null;
    if (locked.length > 0) {
      const { take: _take, skip: _skip, cursor: _cursor, distinct: _distinct, where, ...rest } = args;
      const row = await delegate[how]({ ...rest, where: both(where, these(target, locked)) });
      if (row) return row;
    }
    if (attempt >= leastAttempts && performance.now() >= until)
      throw new SerializationError(
        `${delegate.$name}.${how}ForUpdate: the row that matched was changed ${attempt} times before it could be locked. ` +
          `Give \`wait\` more time, run the transaction again, or let callers take different rows (\`wait: "skip"\`).`,
      );
  }
}
