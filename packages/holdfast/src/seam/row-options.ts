/** The words of row and table locks, as callers use them. */
import { shown } from "./shown.ts";
import type { Capabilities, Support } from "./capabilities.ts";
import type { Connection, Wait } from "./database.ts";
import type { LockRequest, Lockable } from "./key.ts";
import { Identifier } from "./sql.ts";
import { UsageError } from "./errors.ts";
import type { RowStrength, TableMode, TableShape, Where } from "./tables.ts";

/** `"account"`, `"shop.account"`, or `sql.id("shop", "an odd.name")`. */
export type TableName = string | Identifier;

/** The value of a primary key of one column, or an object of its columns. */
export type RowKey<R extends object = Record<string, unknown>> =
  string | number | bigint | boolean | Date | Uint8Array | Partial<R>;
export type RowKeys<R extends object = Record<string, unknown>> = readonly RowKey<R>[];

export type OrderBy<C extends string = string> = C | { readonly [column in C]?: "asc" | "desc" };

export interface RowOptions<C extends string = string> {
  /** Default "update". "no key update" is as exclusive, but lets others insert rows that refer to these. */
  readonly for?: RowStrength;
  /** Milliseconds; "nowait" to throw at once; "skip" to leave out what is locked. Default: the instance's (5 s). */
  readonly wait?: Wait | "skip";
  /** Default: all. */
  readonly columns?: readonly C[];
  /** Which ones `limit` takes, and the order in which they are returned. Not the order in which they are locked. */
  readonly orderBy?: OrderBy | readonly OrderBy[];
  readonly limit?: number;
  /** The columns that name a row, where it is not the primary key: they must be unique together. */
  readonly key?: string | readonly string[];
  /** What to do about keys that name no row: "throw" (default), or "report" them in `missing`. */
  readonly missing?: "throw" | "report";
  readonly signal?: AbortSignal | undefined;
}

/** Rows named by keys are in the order of these; others as `orderBy` says, or in the order of their keys. */
export type LockedRows<R> = R[] & {
  /** Keys that name no row, with `missing: "report"`. */
  readonly missing: readonly RowKey[];
  /** Keys of rows that somebody else had locked, with `wait: "skip"`. */
  readonly skipped: readonly RowKey[];
};

/** What a query of an ORM's builder brings: `getMany`, `getResultList` or `execute` is what runs it there, or it is awaited. The first two have an untyped `execute` as well. */
export type QueryRows<Q> = Q extends { getMany(): Promise<infer R> }
  ? R
  : Q extends { getResultList(): Promise<infer R> }
    ? R
    : Q extends { execute(): Promise<infer R> }
      ? R
      : Q extends PromiseLike<infer R>
        ? R
        : never;

export interface QueryOptions {
  /** Default "update". */
  readonly for?: RowStrength;
  /** Milliseconds; "nowait" to throw at once; "skip" to leave out what is locked. Default: the instance's (5 s). */
  readonly wait?: Wait | "skip";
  readonly signal?: AbortSignal | undefined;
}

export interface TableOptions {
  readonly wait?: Wait | "skip";
  readonly signal?: AbortSignal | undefined;
}

/** Rows as one item of `tx.lockAll`. */
export class RowsItem<R extends object = Record<string, unknown>> {
  declare readonly row: R;
  readonly table: TableName;
  readonly which: RowKeys<R> | Where;
  readonly options: Omit<RowOptions, "wait" | "signal">;
  constructor(table: TableName, which: RowKeys<R> | Where, options: Omit<RowOptions, "wait" | "signal">) {
    this.table = table;
    this.which = which;
    this.options = options;
  }
}

/** Rows to be locked by `tx.lockAll`, together with keys and rows of other tables. */
export function rows<R extends object = Record<string, unknown>>(
  table: TableName,
  which: RowKeys<NoInfer<R>> | Where,
  options: Omit<RowOptions<keyof R & string>, "wait" | "signal"> = {},
): RowsItem<R> {
  return new RowsItem(table, which, options);
}

export type Items = readonly (Lockable | RowsItem<any>)[];
export type AllResults<I extends Items> = {
  -readonly [K in keyof I]: I[K] extends RowsItem<infer R> ? LockedRows<R> : undefined;
};

export interface AllOptions {
  /** For each of the locks. With "skip" nothing could be told apart, so it is not one of the words here. */
  readonly wait?: Wait;
  readonly signal?: AbortSignal | undefined;
}

/** What a transaction's scope asks for; `locks/rows.ts` answers. */
export interface RowLocker<Scope, C extends Connection> {
  rows(
    scope: Scope,
    table: TableName,
    which: readonly unknown[] | Where,
    options: RowOptions,
  ): Promise<LockedRows<object>>;
  query(scope: Scope, query: object, options: QueryOptions): Promise<unknown>;
  all(
    scope: Scope,
    items: readonly (Lockable | LockRequest | RowsItem<any>)[],
    options: AllOptions,
  ): Promise<unknown[]>;
  table(scope: Scope, name: TableName, mode: TableMode, options: TableOptions): Promise<void | boolean>;
  /** What the catalog says of a table. Throws if there is none, or `support` says that `what` cannot be had. */
  describe(
    work: { readonly connection: C; readonly capabilities: Capabilities },
    table: Identifier,
    what: string,
    support: (capabilities: Capabilities) => Support<unknown>,
    /** Ask the catalog, whatever is remembered. */
    fresh?: boolean,
  ): Promise<TableShape>;
}

/** Text is split at dots, as people write it; a name that holds one is written with `sql.id`. */
export function tableName(name: unknown, call: string): Identifier {
  if (name instanceof Identifier) return name;
  if (typeof name !== "string" || name === "")
    throw new UsageError(`${call}: a table is named by a string or by sql.id(…), not by ${shown(name)}`);
  return new Identifier(name.split("."));
}
