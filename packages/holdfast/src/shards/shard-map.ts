/** Which of several databases each one is, and by which way from keys to databases: as it is written down in each of them. */
import { randomUUID } from "node:crypto";
import type { Agreed, AgreedRead, Agreements } from "../seam/agreements.ts";
import type { Placement } from "../transaction/agreement.ts";
import type { Connection, Database } from "../seam/database.ts";
import { ShardMapError, UsageError } from "../seam/errors.ts";
import { withConnection } from "../transaction/one-shot.ts";
import { type Key, key } from "../seam/key.ts";

interface Written {
  /** From 0. */
  readonly shard: number;
  readonly of: number;
  /** Where some keys are routed to; null: the route does not know them. */
  readonly sample: readonly (number | null)[];
}

/**
 * The same list of databases says nothing of the way from a key to one of them. So some keys are routed, and where they came
 * to is written down too. A route that throws for a key it does not know tells nothing by that, and is not held to it.
 */
const sampled = 64;

interface Shard {
  readonly number: number;
  readonly database: Database<unknown, Connection>;
  readonly agreements: Agreements<Connection>;
  /** Its own name, by which all processes write to several of them in the same order. */
  readonly self: string;
  readonly found: Agreed | undefined;
}

export class ShardMap {
  readonly #databases: readonly Database<unknown, Connection>[];
  readonly #route: (key: Key) => number;
  #lazySample: readonly (number | null)[] | undefined;

  /** `route`: the number of the database that a key is on. */
  constructor(databases: readonly Database<unknown, Connection>[], route: (key: Key) => number) {
    this.#databases = databases;
    this.#route = route;
  }

  get #sample(): readonly (number | null)[] {
    return (this.#lazySample ??= Array.from({ length: sampled }, (_, i) => {
      try {
        return this.#route(key("holdfast-sample", i));
      } catch {
        return null;
      }
    }));
  }

  placement(number: number): Placement {
    return {
      check: (text) => this.#check(number, text),
      place: (connection) => this.#place(number, connection),
    };
  }

  #check(number: number, text: string): void {
    const found = JSON.parse(text) as Written;
    const of = this.#databases.length;
    if (found.shard !== number || found.of !== of)
      throw new ShardMapError(
        `This database is written down as shard ${found.shard} of ${found.of}, and here it is taken for shard ${number} of ${of}.`,
      );
    const i = this.#sample.findIndex((to, at) => {
      const before = found.sample[at] ?? null;
      return to !== null && before !== null && before !== to;
    });
    if (i >= 0)
      throw new ShardMapError(
        `Keys are routed otherwise than is written down in shard ${number} of ${of}: holdfast-sample:${i} goes to shard ${this.#sample[i]} here, and to shard ${found.sample[i]} there.`,
      );
  }

  /**
   * Writes down which one each of them is, at the first use of any. All are looked at before any is written to, and all
   * processes write in the same order, whatever the order of their lists: of two that do not agree, one finds at its first
   * write that the other came before. False: not in all of them, for lack of tables or rights.
   */
  async #place(number: number, connection: Connection | undefined): Promise<boolean> {
    const on = (i: number) => (i === number ? connection : undefined);
    const shards = await this.#look(on);
    if (!shards) return false;
    for (const { number: i, found } of shards) if (found) this.#check(i, found.value);
    for (const { number: i, database, agreements } of shards.toSorted((a, b) => (a.self < b.self ? -1 : 1))) {
      const value = this.#value(i);
      const there = await onConnection(database, on(i), async (c) => {
        if (!(await agreements.write(c, "shard", value))) return undefined;
        return (await agreements.read(c)).there?.get("shard");
      });
      if (!there) return false;
      // Somebody who routes alike may have been first.
      this.#check(i, there.value);
    }
    return true;
  }

  /** After keys were moved on purpose: whatever is written down, it is this from now on. */
  async renumber(): Promise<void> {
    const shards = await this.#look(() => undefined, true);
    if (!shards)
      throw new UsageError(
        "renumber: a table of Holdfast's own is missing in one of these databases, or cannot be written. Call hf.migrate() in each of them",
      );
    for (const { number, database, agreements, found } of shards)
      await onConnection(database, undefined, async (connection) => {
        const value = this.#value(number);
        const done = found
          ? await agreements.change(connection, "shard", found, { value, next: undefined })
          : await agreements.write(connection, "shard", value);
        if (!done)
          throw new ShardMapError(
            `Shard ${number} of ${shards.length} was written by somebody else meanwhile.`,
          );
      });
  }

  #value(number: number): string {
    const written: Written = { shard: number, of: this.#databases.length, sample: this.#sample };
    return JSON.stringify(written);
  }

  /** `anew`: those that were made as copies of one another get names of their own. */
  async #look(
    on: (number: number) => Connection | undefined,
    anew = false,
  ): Promise<readonly Shard[] | undefined> {
    const shards: Shard[] = [];
    for (const [number, database] of this.#databases.entries()) {
      const { agreements } = database.engine;
      if (!agreements) return undefined;
      const read = await onConnection(database, on(number), (connection) =>
        named(agreements, connection, anew),
      );
      const self = read.there?.get("self")?.value;
      if (self === undefined) return undefined;
      const twin = shards.find((each) => each.self === self);
      if (twin)
        throw new ShardMapError(
          `Shards ${twin.number} and ${number} are the same database, or one is a copy of the other.`,
        );
      shards.push({ number, database, agreements, self, found: read.there?.get("shard") });
    }
    return shards;
  }
}

/** What is written down in a database that has a name of its own by now. */
async function named(
  agreements: Agreements<Connection>,
  connection: Connection,
  anew: boolean,
): Promise<AgreedRead> {
  const read = await agreements.read(connection);
  const self = read.there?.get("self");
  if (!read.there || (self && !anew)) return read;
  const value = randomUUID();
  if (self) await agreements.change(connection, "self", self, { value, next: undefined });
  else await agreements.write(connection, "self", value);
  return agreements.read(connection);
}

function onConnection<T>(
  database: Database<unknown, Connection>,
  connection: Connection | undefined,
  work: (connection: Connection) => Promise<T>,
): Promise<T> {
  return connection ? work(connection) : withConnection({ database }, work);
}
