/** `shards.move`: the quotas of a subject go to another database, while they are used. */
import { type CallOptions, placeOf, send } from "../batch/calls.ts";
import { checkNames, checkSignal } from "../input/options.ts";
import { checkText, checkWhole } from "../input/values.ts";
import type { Connection, Wait } from "../seam/database.ts";
import {
  CommitUnknownError,
  FileBusyError,
  HoldfastError,
  LockTimeoutError,
  ShardError,
  UsageError,
} from "../seam/errors.ts";
import type { How, Soon } from "../seam/store.ts";
import { instancesOf } from "../shards/shards.ts";
import { storeOf } from "../transaction/instance.ts";
import { contextOf } from "../transaction/scope.ts";
import type { Transactor } from "../transaction/types.ts";
import { checkWait, sleep } from "../waiting/wait.ts";
import { Turns } from "../waiting/turns.ts";
import { textOf } from "./checks.ts";
import { type Homes, homesOf } from "./homes.ts";
import type { BucketName, MovingBucket, QuotaMoves } from "./store.ts";
import type { Subject } from "./types.ts";

export interface MoveOptions {
  /** The place in the list of databases that it is to be on. */
  readonly to: number;
  /** Of these quotas, also if nothing of them was ever used. Left out: of all that the subject has something of. */
  readonly quotas?: readonly string[];
  /** Milliseconds to wait while somebody's transaction has what is to be moved. Default: the instance's (5 s). */
  readonly wait?: Wait;
  /** Milliseconds for the copy of one shard's, during which its callers wait. Default 60 s. */
  readonly deadline?: number;
  readonly signal?: AbortSignal | undefined;
}

/** What was moved: the quota, and the shard that it was on. */
export interface Moved {
  readonly quota: string;
  readonly from: number;
}

const moveOptions = new Set(["to", "quotas", "wait", "deadline", "signal"]);
/** Of one who meets another who moves the same, or connections that break. */
const mostRounds = 10;

/** Each takes a connection of two databases: two that go in opposite directions would wait for each other's. */
const turns = new WeakMap<Homes, Turns>();

function inTurn<T>(homes: Homes, work: () => Promise<T>): Promise<T> {
  let queue = turns.get(homes);
  if (!queue) turns.set(homes, (queue = new Turns(1)));
  return queue.run(work);
}

export async function moveSubject(
  shards: object,
  subject: Subject,
  options: MoveOptions,
): Promise<readonly Moved[]> {
  const call = "shards.move";
  checkNames(call, options, moveOptions);
  const { to, quotas, wait, deadline, signal } = options;
  checkSignal(signal);
  if (wait !== undefined) checkWait(wait, `${call}: wait`);
  if (deadline !== undefined) checkWhole(call, "deadline", deadline, 1);
  if (quotas !== undefined && (!Array.isArray(quotas) || quotas.length === 0))
    throw new UsageError(`${call}: quotas must be a list of names`);
  for (const name of quotas ?? []) checkText(call, "quotas", name);
  const text = textOf(subject);
  const homes = homesOf(instancesOf(shards, call));
  homes.refuseInside(call);
  checkWhole(call, "to", to, 0, homes.all.length - 1);
  return inTurn(homes, async () => {
    const names = new Set(quotas ?? (await homes.quotas(options)));
    const all = [...names].map((quota) => ({ quota, subject: text }));
    return new Mover(homes, options).run(all, quotas !== undefined);
  });
}

/** All buckets that are where no route and no move has put them: to where they are routed to. Resolves to how many. */
export async function settleSubjects(
  shards: object,
  options: Omit<MoveOptions, "to" | "quotas">,
): Promise<number> {
  const call = "shards.settle";
  checkNames(call, options, new Set(["wait", "deadline", "signal"]));
  const instances = instancesOf(shards, call);
  const homes = homesOf(instances);
  homes.refuseInside(call);
  let count = 0;
  for (const instance of homes.all) {
    const quotas = await homes.ask(
      instance,
      [],
      (moves, connection, how) => moves.quotas(connection, how),
      options,
    );
    for (const quota of quotas) {
      for (let after: string | undefined, page = mostSubjects; page === mostSubjects;) {
        const found = await subjectsOn(instance, quota, after);
        for (const subject of found)
          count += await settleSubject(shards, instance, quotas, { quota, subject }, options);
        after = found.at(-1);
        page = found.length;
      }
    }
  }
  return count;
}

const mostSubjects = 500;

async function subjectsOn(
  instance: object,
  quota: string,
  after: string | undefined,
): Promise<readonly string[]> {
  const context = contextOf(instance, "shards.settle");
  const found = await send(
    context,
    placeOf(context, { separate: true }, "shards.settle"),
    { names: [`quota ${quota}`] },
    async (connection, how) =>
      storeOf(context, "quotas", "shards.settle").lists.subjects(
        connection,
        quota,
        { after, most: mostSubjects, of: undefined },
        how,
      ),
  );
  return found.map(({ subject }) => subject);
}

/** With all that the subject has on the same database, and that goes to the same one. */
async function settleSubject(
  shards: object,
  instance: object,
  quotas: readonly string[],
  { quota, subject }: BucketName,
  options: Omit<MoveOptions, "to" | "quotas">,
): Promise<number> {
  const instances = instancesOf(shards, "shards.settle");
  const homes = homesOf(instances);
  const home = instances.at(quota, subject);
  // Where it was moved to on purpose it stays.
  if (home === instance || (await homes.find(home, { quota, subject }))?.to !== undefined) return 0;
  const together = quotas
    .filter((name) => instances.at(name, subject) === home)
    .map((name) => ({ quota: name, subject }));
  const moved = await inTurn(homes, () =>
    new Mover(homes, { ...options, to: homes.all.indexOf(home) }).run(together, false),
  );
  return moved.length;
}

export async function homeOf(shards: object, quota: string, subject: Subject): Promise<object> {
  const call = "shards.home";
  checkText(call, "quota", quota);
  const homes = homesOf(instancesOf(shards, call));
  homes.refuseInside(call);
  const { instance } = await homes.locate(call, { quota, subject: textOf(subject) });
  return instance;
}

class Mover {
  readonly #homes: Homes;
  readonly #options: MoveOptions;
  readonly #target: object;

  constructor(homes: Homes, options: MoveOptions) {
    this.#homes = homes;
    this.#options = options;
    this.#target = homes.all[options.to] as object;
  }

  /** `make`: also those that nothing was ever used of. */
  async run(buckets: readonly BucketName[], make: boolean): Promise<readonly Moved[]> {
    const { signal } = this.#options;
    const moved = new Map<string, Moved>();
    for (let round = 1; ; round++) {
      signal?.throwIfAborted();
      try {
        const left = await this.#elsewhere(buckets, make);
        if (left.size === 0) return [...moved.values()];
        if (round > mostRounds)
          throw new ShardError(
            "shards.move: others move the same subject at the same time, again and again.",
          );
        for (const [source, some] of left) {
          const from = this.#homes.all.indexOf(source);
          for (const { quota } of some) if (!moved.has(quota)) moved.set(quota, { quota, from });
          await this.#move(source, some);
        }
      } catch (error) {
        if (!passes(error) || round >= mostRounds) throw error;
      }
      // Not all at the same moment again.
      if (round > 1) await sleep(Math.random() * 50 * round, signal);
    }
  }

  /** Those that are on other shards, by shard. */
  async #elsewhere(
    buckets: readonly BucketName[],
    make: boolean,
  ): Promise<ReadonlyMap<object, readonly BucketName[]>> {
    const found = await Promise.all(
      buckets.map(async (bucket) => ({ bucket, ...(await this.#homes.locate("shards.move", bucket)) })),
    );
    const left = found.filter(({ instance, made }) => instance !== this.#target && (made || make));
    const groups = Map.groupBy(left, ({ instance }) => instance);
    return new Map([...groups].map(([instance, some]) => [instance, some.map(({ bucket }) => bucket)]));
  }

  async #move(source: object, buckets: readonly BucketName[]): Promise<void> {
    const { wait, signal, deadline } = this.#options;
    const numbers = await this.#homes.ask(
      source,
      buckets,
      (moves, connection, how) => moves.number(connection, buckets, how),
      { ...(wait !== undefined && { wait }), signal },
    );
    if (!numbers) return;
    const moves = buckets.map((bucket, i) => ({ ...bucket, move: numbers[i] as number }));
    // Run once: the number is of this run, and a copy that is under way somewhere is older than any other.
    const once = {
      separate: true,
      retry: false,
      signal,
      ...(wait !== undefined && { wait }),
      ...(deadline !== undefined && { deadline }),
    } as const;
    const [from, to] = [source, this.#target].map((shard) => this.#homes.all.indexOf(shard)) as [
      number,
      number,
    ];
    const left = await (source as Transactor<unknown>).transaction(once, async (here) => {
      const leaving = within(source, here, buckets, this.#options);
      const moving = await leaving((store, connection, how) => store.read(connection, moves, how));
      if (!moving) return false;
      await (this.#target as Transactor<unknown>).transaction(once, async (there) => {
        const arriving = within(this.#target, there, buckets, this.#options);
        for (const one of moving) await copy(one, from, leaving, arriving);
      });
      for (const one of moving)
        await leaving((store, connection, how) => store.leave(connection, one, to, how));
      return true;
    });
    if (left) await this.#homes.settle(this.#target, moves);
  }
}

/** Whatever became of it, it counts in one place, and the next round finds out in which. Who has waited in vain has waited. */
function passes(error: unknown): boolean {
  if (error instanceof LockTimeoutError || error instanceof FileBusyError) return false;
  return error instanceof HoldfastError && (error.retryable || error instanceof CommitUnknownError);
}

type Within = <T>(
  work: (moves: QuotaMoves<Connection>, connection: Connection, how: How) => Soon<T>,
) => Promise<T>;

/** In a transaction of that shard's. */
function within(
  instance: object,
  tx: unknown,
  buckets: readonly BucketName[],
  { wait, signal }: Pick<CallOptions, "wait" | "signal">,
): Within {
  const context = contextOf(instance, "shards.move");
  const names = buckets.map(({ quota, subject }) => `quota ${quota}:${subject}`);
  return (work) =>
    send(
      context,
      placeOf(context, { tx, signal, ...(wait !== undefined && { wait }) }, "shards.move"),
      { names },
      async (connection, how) => work(storeOf(context, "quotas", "shards.move").moves, connection, how),
    );
}

async function copy(moving: MovingBucket, from: number, leaving: Within, arriving: Within): Promise<void> {
  const { bucket } = moving;
  if (!(await arriving((store, connection, how) => store.arrive(connection, moving, from, how))))
    throw new ShardError(
      `shards.move: quota ${bucket.quota} of ${bucket.subject} counts on the other shard too, or is moved there by somebody else. ` +
        "If it was used there under another route, its entries are for people to look at first.",
    );
  for (let version = 0; ;) {
    const lines = await leaving((store, connection, how) => store.lines(connection, bucket, version, how));
    if (lines.length === 0) return;
    await arriving((store, connection, how) => store.follow(connection, bucket, lines, how));
    version = (lines.at(-1) as { version: number }).version + 1;
  }
}
