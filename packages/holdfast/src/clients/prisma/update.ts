/** Prisma's `update`, of a row that nobody has written since it was read: its version is compared in the same statement. */
import type { Connection } from "../../seam/database.ts";
import { RowsMissingError, StaleVersionError, UsageError } from "../../seam/errors.ts";
import { checkNames } from "../../input/options.ts";
import { checkAttempts, untilFresh } from "../../locks/version/fresh.ts";
import type { InstanceContext } from "../../transaction/scope.ts";
import type { Delegate, Schema } from "./find.ts";
import type { PrismaArgs, PrismaWhole } from "./types.ts";

type Values = Record<string, unknown>;

/** A model's fields that can count up. */
type Counting<T> = {
  [K in keyof PrismaWhole<T>]: PrismaWhole<T>[K] extends number | bigint ? K : never;
}[keyof PrismaWhole<T>];

type Data<T> = PrismaArgs<T, "updateMany"> extends { data: infer D } ? D : never;

/** All of it is optional: a function, whatever it returns, would be taken for one. */
interface NoFunction {
  readonly [Symbol.hasInstance]?: never;
}

/** What a function for `data` may return. */
export type PrismaDecided<T> = Data<T> | undefined | Promise<Data<T> | undefined>;

/** Fields of what it returns that the model does not have: as all of `Data` is optional, they would go unnoticed. */
type NoOthers<R, Known> =
  R extends Promise<infer Later>
    ? Promise<NoOthers<Later, Known>>
    : R extends object
      ? { readonly [K in Exclude<keyof R, keyof Known>]?: never }
      : R;

/** Of `updateVersioned`, besides what `findUnique` takes. */
export type PrismaVersioned<T, R> = {
  /**
   * What to set, if `where` names the version that was read; or a function of the row as it is, which may run several times
   * and returns what to set, or nothing.
   */
  readonly data:
    (Data<T> & NoFunction) | ((row: PrismaWhole<T>) => PrismaDecided<T> & R & NoOthers<R, Data<T>>);
  /** How often a function is asked before `StaleVersionError`. Default 10. */
  readonly attempts?: number;
} & ("version" extends Counting<T>
  ? { /** The field that counts up. Default "version". */ readonly version?: Counting<T> }
  : { /** The field that counts up. */ readonly version: Counting<T> });

export const versionedNames = ["data", "version", "attempts"] as const;

export interface UpdateArgs extends Values {
  readonly where: Values;
  readonly data: unknown;
  readonly version?: string;
  readonly attempts?: number;
}

/** Where to write: in the transaction that is named, or in one that `within` opens. */
export interface UpdatePlace {
  readonly context: InstanceContext<unknown, Connection>;
  readonly schema: Schema;
  readonly delegate: Delegate;
  readonly tx: object | undefined;
  /** Its reads show the world as it was at the first of them: what it read once it cannot read anew. */
  readonly snapshot: boolean;
  within<R>(body: (delegate: Delegate) => Promise<R>): Promise<R>;
}

const names = new Set(["where", "select", "include", "omit", ...versionedNames]);

export async function updateVersioned(place: UpdatePlace, args: UpdateArgs): Promise<Values> {
  const { delegate, context, tx } = place;
  const call = `${delegate.$name}.updateVersioned`;
  checkNames(call, args, names);
  const { where, data, version = "version", attempts = 10, ...reading } = args;
  const row = new Row(place, where, version);
  const asking = typeof data === "function";
  if (!asking && row.expected === undefined)
    throw new UsageError(
      `${call}: which version was read? Name it in \`where\` (where: { id, ${version} }), or give a function as \`data\`.`,
    );
  const repeated = asking && row.expected === undefined && !(tx && place.snapshot);
  const update = {
    table: delegate.$name,
    ids: [row.unversioned],
    options: tx ? { tx } : {},
    attempts: repeated ? checkAttempts(attempts) : 1,
  };
  return untilFresh(context, update, async (attempt) => {
    if (!asking) return place.within((on) => row.write(on, row.expected, data as Values, reading, attempt));
    const { seen, now } = await row.read(delegate, attempt);
    const changes = (await (data as (now: Values) => unknown)(now)) as Values | undefined;
    return changes === undefined || changes === null
      ? row.found(delegate, row.unversioned, reading)
      : place.within((on) => row.write(on, seen, changes, reading, attempt));
  });
}

/** One row of a model, by what is unique of it. */
class Row {
  readonly #name: string;
  readonly #fields: ReadonlySet<string>;
  readonly #version: string;
  /** Where it is, whatever its version. */
  readonly unversioned: Values;
  /** The version that the caller has read. */
  readonly expected: unknown;

  constructor({ delegate, schema }: UpdatePlace, where: Values, version: string) {
    const model = schema._runtimeDataModel?.models[delegate.$name];
    this.#name = delegate.$name;
    this.#fields = new Set(model?.fields.map(({ name }) => name));
    this.#version = version;
    if (!this.#fields.has(version))
      throw new UsageError(
        `${delegate.$name} has no field ${version}: add one (version Int @default(0)), or name yours: { version: "…" }`,
      );
    if (typeof where !== "object" || where === null)
      throw new UsageError(`${delegate.$name}.updateVersioned: \`where\` must say which row`);
    const { [version]: expected, ...unversioned } = where;
    if (!["undefined", "number", "bigint"].includes(typeof expected))
      throw new UsageError(`${delegate.$name}.updateVersioned: ${version} in \`where\` must be a number`);
    this.expected = expected;
    this.unversioned = unversioned;
  }

  async read(delegate: Delegate, attempt: number): Promise<{ seen: unknown; now: Values }> {
    const now = await this.found(delegate, this.unversioned, {});
    const seen = now[this.#version];
    if (seen === null)
      throw new UsageError(`${this.#version} of ${this.#name} is null, which equals nothing: @default(0)`);
    if (this.expected !== undefined && String(seen) !== String(this.expected))
      throw new StaleVersionError(this.#name, this.unversioned, this.expected, seen, attempt);
    return { seen, now };
  }

  async found(delegate: Delegate, where: Values, reading: Values): Promise<Values> {
    const row = await delegate.findUnique({ ...reading, where });
    if (!row) throw new RowsMissingError(this.#name, [where]);
    return row;
  }

  /** The version is in the statement that writes: of two that have read the same one, one finds nothing to write to. */
  async write(
    delegate: Delegate,
    seen: unknown,
    changes: Values,
    reading: Values,
    attempt: number,
  ): Promise<Values> {
    if (this.#version in changes)
      throw new UsageError(
        `${this.#name}.updateVersioned: ${this.#version} counts up by itself; leave it out of \`data\``,
      );
    const { count } = await delegate.updateMany({
      where: { ...this.#flat(), [this.#version]: seen },
      data: { ...changes, [this.#version]: { increment: 1 } },
    });
    // It is locked by now, so this is what was written.
    if (count > 0) return this.found(delegate, this.#after(changes), reading);
    const now = await this.found(delegate, this.unversioned, { select: { [this.#version]: true } });
    throw new StaleVersionError(this.#name, this.unversioned, seen, now[this.#version], attempt);
  }

  /** `updateMany` does not know the names of keys of several fields. */
  #flat(): Values {
    const entries = Object.entries(this.unversioned);
    return Object.assign(
      {},
      ...entries.map(([name, value]) => (this.#isKey(name) ? value : { [name]: value })),
    );
  }

  /** Where it is once it is written: what else `where` asks for may not be so any more. */
  #after(changes: Values): Values {
    const kept = Object.entries(this.unversioned).filter(
      ([name, value]) => this.#isKey(name) || (this.#fields.has(name) && !isPlain(value)),
    );
    const set = (name: string, value: unknown): unknown => {
      const next = changes[name];
      if (next === undefined) return value;
      return isPlain(next) && "set" in next ? next["set"] : next;
    };
    return Object.fromEntries(
      kept.map(([name, value]) => [
        name,
        this.#isKey(name)
          ? Object.fromEntries(Object.entries(value as Values).map(([of, is]) => [of, set(of, is)]))
          : set(name, value),
      ]),
    );
  }

  #isKey(name: string): boolean {
    return !this.#fields.has(name) && !["AND", "OR", "NOT"].includes(name);
  }
}

/** A filter or an operation, and not a value such as a Date or a Decimal. */
function isPlain(value: unknown): value is Values {
  return typeof value === "object" && value !== null && Object.getPrototypeOf(value) === Object.prototype;
}
