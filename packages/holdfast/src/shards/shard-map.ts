/** Which of several databases each one is, and by which way from keys to databases: as it is written down in each of them. */
import { randomUUID } from "node:crypto";
import {
  type Agreed,
  type AgreedRead,
  type Agreements,
  type MapEpoch,
  type MapUsers,
  trustMs,
} from "../seam/agreements.ts";
import { type Placement, isAlone, writeAlone } from "../transaction/agreement.ts";
import type { Connection, Database } from "../seam/database.ts";
import { type Holder, ShardMapError, UsageError, some } from "../seam/errors.ts";
import { withConnection } from "../transaction/one-shot.ts";
import { type Key, key } from "../seam/key.ts";
import { sleep } from "../waiting/wait.ts";
import { type Left, refuseMisplaced } from "./misplaced.ts";

interface Written {
  /** From 0. */
  readonly shard: number;
  readonly of: number;
  /** Where some keys are routed to; null: the route does not know them. */
  readonly sample: readonly (number | null)[];
  /** Of the route, as its author counts; absent: unknown. */
  readonly version?: string;
  /** The number of the map, which statements compare with the one that the server has. Absent: 0. */
  readonly epoch?: number;
  /** Something may still be where the map before had it. */
  readonly unsettled?: boolean;
}

export interface MapOptions {
  /** Of the route. Undefined: nobody says when it changes. */
  readonly version?: string | undefined;
  /** The route is Holdfast's own: with the same version it is the same. */
  readonly isOurs?: boolean;
}

export interface RenumberCall {
  readonly waitMs: number;
  /** All processes are: nobody goes by what was read before. */
  readonly stopped: boolean;
  readonly leave: readonly Left[];
  /** Names of keys, for people. */
  readonly show: (name: string) => string;
  readonly signal: AbortSignal | undefined;
}

interface MapState {
  readonly epoch: number;
  readonly unsettled: boolean;
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

interface Looked {
  readonly shards: readonly Shard[];
  /** Those without tables, or that this user may not write to. */
  readonly missing: readonly number[];
}

export class ShardMap {
  readonly #databases: readonly Database<unknown, Connection>[];
  readonly #route: (key: Key) => number;
  readonly #options: MapOptions;
  /** Of each database, as it was read last. */
  readonly #states: (MapState | undefined)[] = [];
  /** The number of the map that this process has gone by: none but its own `renumber` makes it another one. */
  #goneBy: number | undefined;
  #lazySample: readonly (number | null)[] | undefined;

  /** `route`: the number of the database that a key is on. */
  constructor(
    databases: readonly Database<unknown, Connection>[],
    route: (key: Key) => number,
    options: MapOptions = {},
  ) {
    this.#databases = databases;
    this.#route = route;
    this.#options = options;
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
      check: (found) => this.#check(number, found),
      place: () => this.#place(),
    };
  }

  /** What was counted elsewhere before, by another map, may still be there: as it was written where it was read last. */
  get unsettled(): boolean {
    return this.#states.some((state) => state?.unsettled);
  }

  /** Grows with every map. */
  get epoch(): number {
    return Math.max(0, ...this.#states.map((state) => state?.epoch ?? 0));
  }

  #check(number: number, { value, next }: Pick<Agreed, "value" | "next">): number {
    const of = this.#databases.length;
    if (next !== undefined)
      throw new ShardMapError(
        `The list of databases is being changed: nothing is granted on shard ${number} until that is done. If the process that called renumber() was stopped, call it again.`,
        { retryable: true },
      );
    if (isAlone({ value })) throw usedAlone(number);
    const found = JSON.parse(value) as Written;
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
    const { version } = this.#options;
    if (found.version !== version)
      throw new ShardMapError(
        `The route of shard ${number} of ${of} has ${versionText(found.version)} there, and ${versionText(version)} here.`,
      );
    const { epoch = 0, unsettled = false } = found;
    if (epoch !== (this.#goneBy ??= epoch))
      throw new ShardMapError(
        `The map of shard ${number} has number ${epoch}, and this process has begun with number ${this.#goneBy}. Its route may be another one now, ` +
          "which samples do not show: restart this process with the new list and route.",
      );
    this.#states[number] = { epoch, unsettled };
    return epoch;
  }

  /**
   * Writes down which one each of them is, at the first use of any. All are looked at before any is written to, and all
   * processes write in the same order, whatever the order of their lists: of two that do not agree, one finds at its first
   * write that the other came before. False: not in all of them, for lack of tables or rights.
   */
  async #place(): Promise<boolean> {
    const { shards, missing } = await this.#look();
    for (const { number: i, found } of shards) if (found) this.#check(i, found);
    const [without] = missing;
    // One that was added to the list of others is not to be used before it counts.
    if (without !== undefined && shards.some(({ found }) => found))
      throw new ShardMapError(
        `Shard ${without} of ${this.#databases.length} has no tables of Holdfast's, or this user may not read them, and others of the list have: call hf.migrate() there.`,
      );
    if (without !== undefined) return false;
    const filled = await filledOf(shards.filter(({ found }) => !found));
    // Somebody who routes alike may have written it down meanwhile, and have begun.
    const there = filled.length === 0 ? [] : (await this.#look()).shards;
    for (const { number: i } of filled)
      if (!there.some(({ number, found }) => number === i && found)) throw usedAlone(i);
    const epoch = Math.max(...(await Promise.all(shards.map((shard) => epochOf(shard)))));
    for (const { number: i, database, agreements, found } of shards) {
      const written = await withConnection({ database }, async (c) => {
        const read = (await agreements.map?.read(c)) ?? epoch;
        if (!found && read !== epoch)
          throw new ShardMapError(
            `Nothing is written down in shard ${i}, and others have map number ${epoch}.`,
          );
        const value = this.#value(i, { epoch, unsettled: this.unsettled });
        if (!(await agreements.write(c, "shard", value))) return undefined;
        return (await agreements.read(c)).there?.get("shard");
      });
      if (!written) return false;
      // Somebody who routes alike may have been first.
      this.#check(i, written);
    }
    return true;
  }

  /**
   * Whatever is written down, it is this from now on. First nobody is let in any more, in any of them; then those that are in are
   * waited for; only then it is opened again, for those who go by the new map. Who dies in between leaves it closed, for the next who
   * calls this.
   */
  async renumber(call: RenumberCall): Promise<void> {
    const { shards, missing } = await this.#found();
    if (missing.length > 0)
      throw new UsageError(
        "renumber: a table of Holdfast's own is missing in one of these databases, or cannot be written. Call hf.migrate() in each of them",
      );
    if (!call.stopped && shards.some(({ agreements }) => !agreements.map))
      throw new UsageError(
        "renumber: no statement compares the map on these databases, so that transactions and processes of the old list would go on beside those of " +
          "the new one. Stop all processes that use them, then call renumber({ stopped: true })",
      );
    const placed = shards.filter((shard): shard is PlacedShard => shard.found !== undefined);
    const begun = this.#begun(shards);
    if (begun) {
      for (const shard of begun.left) await this.#open(shard, begun.state);
      this.#goneBy = begun.state.epoch;
      for (const { number } of shards) this.#states[number] = begun.state;
      return;
    }
    await this.#checkPlaces(placed);
    const refuse = () => refuseMisplaced(this.#databases, this.#route, call.show, call.leave);
    await refuse();
    const epoch = 1 + Math.max(...(await Promise.all(shards.map((shard) => epochOf(shard)))));
    const unsettled = placed.some(({ agreements }) => !agreements.map) || (await filledOf(shards)).length > 0;
    const state = { epoch, unsettled };
    const closed: ClosedShard[] = [];
    const isAsBefore = !placed.some(({ found }) => found.next !== undefined);
    try {
      for (const shard of placed) closed.push(await this.#close(shard, state));
      await drained(closed, call);
      // What has come since it was looked.
      await refuse();
    } catch (error) {
      if (isAsBefore) await reopen(closed);
      throw error instanceof InTheWay ? error.told(isAsBefore) : error;
    }
    await raiseFences(shards);
    this.#goneBy = epoch;
    for (const shard of shards) {
      const mark = closed.find(({ number }) => number === shard.number)?.closed;
      await this.#open({ ...shard, found: mark }, state);
    }
  }

  /** With a row in each database that is in use. */
  async #found(): Promise<Looked> {
    const before = await this.#look(true);
    const used = await filledOf(before.shards.filter(({ found }) => !found));
    if (used.length === 0) return before;
    for (const { database, agreements } of used)
      await withConnection({ database }, (c) => writeAlone(agreements, c));
    const { shards, missing } = await this.#look();
    // A user who may not write that may not change the map either.
    const isRefused = ({ number, found }: Shard) => !found && used.some((each) => each.number === number);
    return { shards, missing: [...missing, ...shards.filter(isRefused).map(({ number }) => number)] };
  }

  /**
   * A call before this one has begun to open what this one would write, and processes go by it already. It is known to be the same only
   * if the route has a version. A route of its author's own may have kept it by mistake: so once it is settled, that is not believed.
   */
  #begun(
    shards: readonly Shard[],
  ): { readonly state: MapState; readonly left: readonly Shard[] } | undefined {
    const { version, isOurs = false } = this.#options;
    if (version === undefined) return undefined;
    const open = shards.filter(({ found }) => found && found.next === undefined);
    const read = open.map(({ found }) => JSON.parse((found as Agreed).value) as Written);
    const epoch = read[0]?.epoch ?? 0;
    const unsettled = read.some((each) => each.unsettled);
    const left = shards.filter((shard) => !open.includes(shard));
    if (open.length === 0 || (left.length === 0 && !unsettled && !isOurs)) return undefined;
    const isSame = ({ number, found }: Shard) =>
      found === undefined ||
      [false, true].some(
        (word) => (found.next ?? found.value) === this.#value(number, { epoch, unsettled: word }),
      );
    return shards.every(isSame) ? { state: { epoch, unsettled }, left } : undefined;
  }

  /** Nothing is left where another map had it. */
  async settled(): Promise<void> {
    for (const { number, database, agreements, found } of (await this.#look()).shards) {
      if (!found) continue;
      const state = { epoch: this.#check(number, found), unsettled: false };
      const value = this.#value(number, state);
      const done = await withConnection({ database }, (c) =>
        agreements.change(c, "shard", found, { value, next: undefined }),
      );
      if (!done) throw changedMeanwhile(number);
      this.#states[number] = state;
    }
  }

  /** Buckets that have moved say so by the place in the list, and what is on a place that is left out is found by nobody. */
  async #checkPlaces(placed: readonly PlacedShard[]): Promise<void> {
    const count = this.#databases.length;
    for (const { number, database, agreements, found } of placed) {
      if (isAlone(found)) continue;
      const { shard: before, of, sample, unsettled } = JSON.parse(found.value) as Written;
      if (of > count && (unsettled || found.next !== undefined))
        throw tooShort(
          count,
          of,
          "something may still be on the others. Call settle() with the longer list first",
        );
      if (of > count && !sample.every((to) => to !== null && to < count))
        throw tooShort(
          count,
          of,
          "keys are routed to the others, or the route throws for keys that it does not know. With the longer list, make a route that leads to no place which is " +
            "left out, whatever the key is; call renumber() and settle() with it",
        );
      if (!agreements.map) continue;
      const { moved, farthest = 0 } = await usersOf(database, agreements.map);
      if (farthest >= count)
        throw tooShort(
          count,
          of,
          `subjects were moved to shard ${farthest} on purpose. Move them to another one first`,
        );
      if (before !== number && moved)
        throw new ShardMapError(
          `Shard ${before} would become shard ${number}, and what was moved from it or to it is found by its number. Leave each database at its place in the list, and add new ones at the end.`,
        );
    }
  }

  async #close(shard: PlacedShard, state: MapState): Promise<ClosedShard> {
    const { number, database, agreements, found } = shard;
    return withConnection({ database }, async (c) => {
      const next = this.#value(number, state);
      const closed = await agreements.change(c, "shard", found, { value: found.value, next });
      if (!closed) throw changedMeanwhile(number);
      const before = await agreements.map?.read(c);
      await agreements.map?.write(c, state.epoch, closed);
      return { ...shard, closed, before };
    });
  }

  /** `found`: as it was closed; undefined: nobody has written anything there. */
  async #open({ number, database, agreements, found }: Shard, state: MapState): Promise<void> {
    const value = this.#value(number, state);
    const done = await withConnection({ database }, async (c) => {
      await agreements.map?.write(c, state.epoch, found);
      if (found) return agreements.change(c, "shard", found, { value, next: undefined });
      await agreements.write(c, "shard", value);
      return (await agreements.read(c)).there?.get("shard")?.value === value;
    });
    if (!done) throw changedMeanwhile(number);
    this.#states[number] = state;
  }

  #value(number: number, { epoch, unsettled }: MapState): string {
    const written: Written = {
      shard: number,
      of: this.#databases.length,
      sample: this.#sample,
      ...(this.#options.version !== undefined && { version: this.#options.version }),
      epoch,
      ...(unsettled && { unsettled }),
    };
    return JSON.stringify(written);
  }

  /** In the order in which all processes write to them. `anew`: those that were made as copies of one another get names of their own. */
  async #look(anew = false): Promise<Looked> {
    const shards: Shard[] = [];
    const missing: number[] = [];
    for (const [number, database] of this.#databases.entries()) {
      const { agreements } = database.engine;
      const isTaken = (name: string) => shards.some((each) => each.self === name);
      const read =
        agreements &&
        (await withConnection({ database }, (connection) =>
          named(agreements, connection, anew ? isTaken : undefined),
        ));
      const self = read?.there?.get("self")?.value;
      if (!agreements || self === undefined) {
        missing.push(number);
        continue;
      }
      const twin = shards.find((each) => each.self === self);
      if (twin)
        throw new ShardMapError(
          `Shards ${twin.number} and ${number} are the same database, or one is a copy of the other.`,
        );
      shards.push({ number, database, agreements, self, found: read?.there?.get("shard") });
    }
    return { shards: shards.toSorted((a, b) => (a.self < b.self ? -1 : 1)), missing };
  }
}

type PlacedShard = Shard & { readonly found: Agreed };
type ClosedShard = PlacedShard & { readonly closed: Agreed; readonly before: number | undefined };

const changedMeanwhile = (number: number) =>
  new ShardMapError(`Shard ${number} was written by somebody else meanwhile.`, { retryable: true });

const usedAlone = (number: number) =>
  new ShardMapError(
    `One instance has used shard ${number} alone, and may be at it still. Stop what uses it alone, or make it one of sharded too. Then call renumber(), once: ` +
      "it waits for half a minute, until nobody goes by that any more.",
  );

const tooShort = (count: number, of: number, why: string) =>
  new UsageError(`renumber: a list of ${count} databases would follow on one of ${of}, and ${why}`);

const versionText = (version: string | undefined) =>
  version === undefined ? "no version" : `version ${JSON.stringify(version)}`;

async function epochOf({ database, agreements, found }: Shard): Promise<number> {
  const written = found && !isAlone(found) ? ((JSON.parse(found.value) as Written).epoch ?? 0) : 0;
  const { map } = agreements;
  return Math.max(written, map ? await withConnection({ database }, (c) => map.read(c)) : 0);
}

function usersOf(
  database: Database<unknown, Connection>,
  map: MapEpoch<Connection>,
  alone = false,
): Promise<MapUsers> {
  return withConnection({ database }, (c) => map.users(c, alone));
}

/** Those on which a pattern has written something. */
async function filledOf(shards: readonly Shard[]): Promise<readonly Shard[]> {
  const found: Shard[] = [];
  for (const shard of shards) {
    const { map } = shard.agreements;
    if (map && (await usersOf(shard.database, map)).filled) found.push(shard);
  }
  return found;
}

async function reopen(closed: readonly ClosedShard[]): Promise<void> {
  for (const { database, agreements, found, closed: mark, before } of closed)
    await withConnection({ database }, async (c) => {
      if (before !== undefined) await agreements.map?.write(c, before, mark);
      await agreements.change(c, "shard", mark, { value: found.value, next: undefined });
    });
}

/** Until those are gone that were let in before it was closed: transactions, sessions that hold locks, leases. */
async function drained(
  closed: readonly ClosedShard[],
  { waitMs, stopped, signal }: RenumberCall,
): Promise<void> {
  // An instance that uses one alone compares nothing, and goes by what it has read.
  if (!stopped && closed.some(({ found }) => isAlone(found))) await sleep(trustMs + 1000, signal);
  const until = performance.now() + waitMs;
  await Promise.all(
    closed.map(async ({ number, database, found, agreements: { map } }) => {
      if (!map) return;
      const ask = () => usersOf(database, map, isAlone(found));
      const open = new Map((await ask()).transactions);
      for (let now = await ask(); ; now = await ask()) {
        for (const tx of open.keys()) if (!now.transactions.has(tx)) open.delete(tx);
        if (open.size === 0 && now.sessions.length === 0 && now.leasedMs === 0) return;
        if (performance.now() > until)
          throw new InTheWay(number, waitMs, [...open.values(), ...now.sessions], now.leasedMs);
        await sleep(20, signal);
      }
    }),
  );
}

class InTheWay extends Error {
  constructor(number: number, waitMs: number, holders: readonly Holder[], leasedMs: number) {
    const who = holders.map(({ pid, application }) => `pid ${pid} (application "${application}")`);
    if (leasedMs > 0) who.push(`a lease that lasts for ${Math.ceil(leasedMs / 1000)} s more`);
    super(
      `renumber: after ${waitMs} ms there was still, on shard ${number}, ${some(who)}: what is held by the old list would be granted by the new one.`,
    );
  }

  /** What was left half done before is not as it was before that. */
  told(isAsBefore: boolean): ShardMapError {
    const now = isAsBefore
      ? "Everything is as before."
      : "The databases stay closed, as a renumber() before this one has left them: call it again.";
    return new ShardMapError(`${this.message} ${now} Pass { wait } to wait longer.`, { retryable: true });
  }
}

/** A lease that goes to another database must not get a smaller fence there. */
async function raiseFences(shards: readonly Shard[]): Promise<void> {
  let newest = 0;
  for (let round = 1; round <= 2; round++)
    for (const { database, agreements } of shards)
      if (agreements.map)
        newest = Math.max(
          newest,
          await withConnection({ database }, (c) => agreements.map?.fence(c, newest) as Promise<number>),
        );
}

/** What is written down in a database that has a name of its own by now. */
async function named(
  agreements: Agreements<Connection>,
  connection: Connection,
  isTaken: ((name: string) => boolean) | undefined,
): Promise<AgreedRead> {
  const read = await agreements.read(connection);
  const self = read.there?.get("self");
  if (!read.there || (self && !isTaken?.(self.value))) return read;
  const value = randomUUID();
  if (self) await agreements.change(connection, "self", self, { value, next: undefined });
  else await agreements.write(connection, "self", value);
  return agreements.read(connection);
}
