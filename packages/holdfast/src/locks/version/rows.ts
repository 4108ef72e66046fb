import { isSupported } from "../../seam/capabilities.ts";
import type { Connection, Row } from "../../seam/database.ts";
import {
  CommitUnknownError,
  LockTimeoutError,
  RowsMissingError,
  StaleVersionError,
  UsageError,
  shownKey,
  some,
} from "../../seam/errors.ts";
import { classify } from "../../seam/failure.ts";
import type { RowKey } from "../../seam/row-options.ts";
import type { Identifier } from "../../seam/sql.ts";
import type { RowCall, TableShape, Tables } from "../../seam/tables.ts";
import { type InstanceContext, type Transaction, scopeOf } from "../../transaction/scope.ts";
import { keyValues } from "../rows.ts";
import { type Place, waitMsOf } from "./place.ts";

/** The rows of a table with a column of versions: reads them, locks them, and writes what has the version that was read. */
export class VersionedRows<R extends object> {
  /** For people. */
  readonly name: string;
  readonly #context: InstanceContext<unknown, Connection>;
  readonly #table: Identifier;
  readonly #version: string;
  /** The columns that name a row; undefined: the primary key. */
  readonly #key: readonly string[] | undefined;

  constructor(
    context: InstanceContext<unknown, Connection>,
    table: Identifier,
    version: string,
    key: readonly string[] | undefined,
  ) {
    this.name = table.path.join(".");
    this.#context = context;
    this.#table = table;
    this.#version = version;
    this.#key = key;
  }

  get #tables(): Tables<Connection> {
    return this.#context.database.engine.tables as Tables<Connection>;
  }

  async #shape(
    place: Place,
    columns: readonly string[] = [],
    fresh = false,
  ): Promise<{ shape: TableShape; key: readonly string[] }> {
    const { connection, capabilities } = place;
    const shape = await this.#context.rows.describe(
      { connection, capabilities },
      this.#table,
      "versioned",
      (c) => c.versions,
      fresh,
    );
    // It may have got the column since the catalog was asked.
    if (!fresh && [this.#version, ...columns].some((name) => !shape.columns.has(name)))
      return this.#shape(place, columns, true);
    const key = this.#key ?? shape.key;
    if (key.length === 0)
      throw new UsageError(
        `versioned: ${shape.name} has no primary key; name the columns that do: { key: […] }`,
      );
    if (!shape.columns.has(this.#version))
      throw new UsageError(
        `versioned: ${shape.name} has no column ${this.#version}. Add one (integer NOT NULL DEFAULT 0), or name yours: { version: "…" }.`,
      );
    return { shape, key };
  }

  /** Without a lock, in the order of `ids`. */
  async read(place: Place, ids: readonly RowKey<R>[]): Promise<readonly (Row | undefined)[]> {
    if (!Array.isArray(ids)) throw new UsageError("versioned: the keys must be a list");
    const { shape, key } = await this.#shape(place);
    if (ids.length === 0) return [];
    const call: RowCall = {
      table: this.#table,
      shape,
      key,
      which: { keys: ids.map((id) => keyValues("versioned", shape.name, key, id)) },
      strength: undefined,
      wait: "nowait",
      columns: undefined,
      orderBy: [],
      limit: undefined,
      joined: false,
      capabilities: place.capabilities,
    };
    const found = await this.#tables.select(place.connection, call);
    return found.granted ? found.rows : [];
  }

  async lock<Native>(tx: Transaction<Native>, ids: readonly RowKey<R>[]): Promise<Row[]> {
    const { rowLocks } = this.#context.known() ?? (await this.#context.capabilities());
    // Without row locks the writes, which compare the versions again, are enough: of two that meet one fails.
    if (!isSupported(rowLocks)) {
      const rows = await scopeOf(tx, "versioned").work((work) => this.read({ ...work, alone: false }, ids));
      const missing = ids.filter((_, i) => rows[i] === undefined);
      if (missing.length > 0) throw new RowsMissingError(this.name, missing);
      return rows as Row[];
    }
    const weaker = rowLocks.includes("no key update");
    return tx.rows<Row>(this.#table, ids, {
      for: weaker ? "no key update" : "update",
      ...(this.#key && { key: this.#key }),
    });
  }

  /** `row`: as it was read. Undefined: it has another version by now. */
  async write(place: Place, id: RowKey<R>, row: Row, changes: object): Promise<Row | undefined> {
    if (this.#version in changes)
      throw new UsageError(`versioned: ${this.#version} counts up by itself; leave it out of the changes`);
    const given = Object.fromEntries(Object.entries(changes).filter(([, value]) => value !== undefined));
    const { shape, key } = await this.#shape(place, Object.keys(given));
    const expected = this.#expected(shape, id, row);
    const what = `it wrote ${shape.name} ${shownKey(id)} by itself`;
    const waitMs = waitMsOf(this.#context);
    place.signal?.throwIfAborted();
    place.wrote = what;
    const found = await this.#tables
      .write(place.connection, {
        table: this.#table,
        shape,
        key,
        id: keyValues("versioned", shape.name, key, id),
        version: this.#version,
        expected,
        changes: given,
        waitMs,
        alone: place.alone,
      })
      .catch((error: unknown) => {
        // Sent, and the answer lost: nobody can tell whether a version that is there now was ours.
        const lost = place.connection.lost.aborted || classify(this.#context.database, error) === "lost";
        throw place.alone && lost ? new CommitUnknownError(what, error) : error;
      });
    if (found.granted) return found.rows[0];
    const keys = [this.#context.show(`${shape.name}[${shownKey(id)}]`)];
    const blocked = { keys, holders: [], waitedMs: waitMs };
    throw new LockTimeoutError(blocked, found.cause, place.alone || found.usable);
  }

  #expected(shape: TableShape, id: RowKey<R>, row: Row): unknown {
    const expected = row[this.#version];
    if (expected === undefined)
      throw new UsageError(
        `versioned: the client does not return ${this.#version} under that name, but ${some(Object.keys(row))}. Does it rename columns? Then name yours with a single word, in lower case.`,
      );
    if (expected === null)
      throw new UsageError(
        `versioned: ${this.#version} of ${shape.name} ${shownKey(id)} is NULL, which equals nothing: make the column NOT NULL DEFAULT 0`,
      );
    return expected;
  }

  /** Whether they have the same version. */
  same(one: Row | undefined, other: Row | undefined): boolean {
    return String(one?.[this.#version]) === String(other?.[this.#version]);
  }

  /** Throws that the row has another version than the one that was read. */
  async stale(place: Place, id: RowKey<R>, row: Row, attempt: number): Promise<never> {
    const [now] = await this.read(place, [id]);
    throw new StaleVersionError(this.name, id, row[this.#version], now?.[this.#version], attempt);
  }
}
