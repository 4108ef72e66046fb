/** Tables of ours, described once: what makes, reads and writes them is made from that, whatever the engine. */

/** What a column holds. `serial`: a number that the database gives it. `moment`: microseconds since 1970. */
export type ColumnKind = "text" | "integer" | "moment" | "json" | "integers" | "boolean" | "serial";

/** `?`: it may be NULL, which is undefined here. */
export type Column = ColumnKind | `${Exclude<ColumnKind, "serial">}?`;

export interface Table<Columns extends Readonly<Record<string, Column>> = Readonly<Record<string, Column>>> {
  readonly name: string;
  readonly columns: Columns;
  readonly key: readonly string[];
  /** Besides the key. */
  readonly unique?: readonly (readonly string[])[];
  readonly indexes?: readonly (readonly string[])[];
}

/** The same, of columns that it has. */
interface Description<Columns extends Readonly<Record<string, Column>>> extends Table<Columns> {
  readonly key: readonly (string & keyof Columns)[];
  readonly unique?: readonly (readonly (string & keyof Columns)[])[];
  readonly indexes?: readonly (readonly (string & keyof Columns)[])[];
}

/** Stands for a moment that never comes: what a `moment` can be at the most. The year 2255. */
export const never = Number.MAX_SAFE_INTEGER;

interface Values {
  text: string;
  integer: number;
  serial: number;
  moment: number;
  json: unknown;
  integers: readonly number[];
  boolean: boolean;
}

type ValueOf<C extends Column> = C extends `${infer K extends ColumnKind}?`
  ? Values[K] | undefined
  : C extends ColumnKind
    ? Values[C]
    : never;

export type RowOf<T extends Table> = { readonly [K in keyof T["columns"]]: ValueOf<T["columns"][K]> };

/** A row to be written: what may be NULL, or is given by the database, may be left out. */
export type NewRow<T extends Table> = {
  readonly [K in keyof T["columns"] as T["columns"][K] extends `${string}?` | "serial" ? never : K]: ValueOf<
    T["columns"][K]
  >;
} & { readonly [K in keyof T["columns"]]?: ValueOf<T["columns"][K]> };

export function table<const Columns extends Readonly<Record<string, Column>>>(
  description: Description<Columns>,
): Table<Columns> {
  return description;
}

const bare = (column: Column): ColumnKind => column.replace("?", "") as ColumnKind;

const kinds = new WeakMap<Table, Readonly<Record<string, ColumnKind>>>();

export function kindOf(of: Table, column: string): ColumnKind {
  let known = kinds.get(of);
  if (!known) {
    const all = Object.entries(of.columns).map(([name, each]) => [name, bare(each)] as const);
    kinds.set(of, (known = Object.fromEntries(all)));
  }
  return known[column] as ColumnKind;
}

export const mayBeNull = (of: Table, column: string): boolean => of.columns[column]?.endsWith("?") ?? false;
