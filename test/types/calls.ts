/** Compiled, never run: what calls take, what they refuse, and what they return. */
import {
  type Capabilities,
  type Failure,
  type Held,
  type Holdfast,
  type Key,
  type Lease,
  type LeaseInfo,
  type OnceResult,
  type Permit,
  type Semaphore,
  type Sharded,
  type Statement,
  type Transaction,
  type TryLockResult,
  fenced,
  holdfast,
  isRetryable,
  key,
  once,
  rows,
  sharded,
  shared,
  sql,
  versioned,
} from "holdfast";
import { fromPg } from "holdfast/pg";
import { Pool, type PoolClient } from "pg";

const hf: Holdfast<PoolClient> = holdfast(fromPg(new Pool()));
const one: Key = key("upload", 42);

export function keys(): void {
  key("upload", 42, 42n, "a");
  key.bigint(42n);
  key.int(1, 2);
  key.hashtext("a");
  key.hashtext("a", "b");
  key.hashtextextended("a", 1n);
  // @ts-expect-error the namespace is text
  key(42);
  // @ts-expect-error a key has a namespace
  key();
  // @ts-expect-error an id that may be missing would be everybody's lock
  key("upload", undefined);
  // @ts-expect-error an object has no identity to go by
  key("upload", { id: 42 });
  // @ts-expect-error two at the most
  key.hashtext("a", "b", "c");
  // @ts-expect-error shared takes a key
  shared("upload");
  // @ts-expect-error keys do not change
  one.id = "other";
}

export async function locks(): Promise<void> {
  await hf.lock(one, async () => {});
  await hf.lock([one, shared(one)], async () => {});
  // @ts-expect-error a string is no key
  await hf.lock("upload", async () => {});
  // @ts-expect-error nor is one in a list
  await hf.lock([one, "upload"], async () => {});
  // @ts-expect-error or in the options
  await hf.transaction({ lock: "upload" }, async () => {});
  // @ts-expect-error or in a transaction
  await hf.transaction((tx) => tx.lock("upload"));
  // @ts-expect-error or for a session
  await hf.hold("upload");
  // @ts-expect-error a lock that may be missing is no lock
  await hf.lock(undefined, async () => {});
  // @ts-expect-error what looks like a key is not made by key(…)
  await hf.lock({ name: "upload", id: "upload" }, async () => {});
  // @ts-expect-error `lock` says what is locked already
  await hf.lock(one, async () => {}, { lock: one });
}

export async function options(): Promise<void> {
  await hf.transaction({ lock: one, wait: 100, deadline: 1000, retry: { attempts: 2 } }, async () => {});
  await hf.transaction({ wait: "nowait", isolation: "serializable", readOnly: true }, async () => {});
  await hf.transaction({ signal: undefined, retry: false, separate: true }, async () => {});
  // @ts-expect-error to skip is a way to take jobs, not to wait for a lock
  await hf.transaction({ lock: one, wait: "skip" }, async () => {});
  // @ts-expect-error waits are milliseconds
  await hf.transaction({ lock: one, wait: "5s" }, async () => {});
  // @ts-expect-error a typo
  await hf.transaction({ locks: one }, async () => {});
  // @ts-expect-error a typo
  await hf.transaction({ deadlin: 1000 }, async () => {});
  // @ts-expect-error a typo in a value
  await hf.transaction({ isolation: "serialisable" }, async () => {});
  // @ts-expect-error levels are written in lower case
  await hf.transaction({ isolation: "SERIALIZABLE" }, async () => {});
  // @ts-expect-error what may be missing must be left out, or it would be no lock at all
  await hf.transaction({ lock: undefined }, async () => {});
  // @ts-expect-error a typo inside retry
  await hf.transaction({ retry: { attemps: 2 } }, async () => {});
  // @ts-expect-error `true` would say nothing
  await hf.transaction({ retry: true }, async () => {});
  // @ts-expect-error only lock timeouts can be added
  await hf.transaction({ retry: { on: ["unique"] } }, async () => {});
  // @ts-expect-error a body is needed
  await hf.transaction({ lock: one });
  // @ts-expect-error a body that is not async may have forgotten what it started
  await hf.transaction(() => 1);
  // @ts-expect-error tryLock does not wait
  await hf.tryLock(one, async () => {}, { wait: 100 });
  // @ts-expect-error a nested transaction has no deadline of its own
  await hf.transaction((tx) => tx.transaction({ deadline: 1000 }, async () => {}));
  // @ts-expect-error a typo in the instance's options
  holdfast(fromPg(new Pool()), { wiat: 100 });
}

export async function results(): Promise<void> {
  const value: number = await hf.transaction(async () => 1);
  // @ts-expect-error what the body returns is what comes out
  const text: string = await hf.transaction(async () => 1);

  const tried: TryLockResult<number> = await hf.tryLock(one, async () => 1);
  // @ts-expect-error there is a value only if the lock was had
  const unchecked: number = tried.value;
  if (tried.acquired) {
    const checked: number = tried.value;
    void checked;
  } else {
    // @ts-expect-error and none if not
    void tried.value;
  }

  await using held: Held = await hf.hold(one, { wait: 100 });
  const signal: AbortSignal = held.signal;
  const found: Capabilities = await hf.capabilities();
  // @ts-expect-error a gap is an object, which is true: it must be told apart from what is there
  const shares: true = found.sharedLocks;
  const failure: Failure | undefined = hf.classify(new Error("x"));
  const again: boolean = isRetryable(failure);
  void [value, text, unchecked, signal, shares, again];
}

export async function insideTransactions(): Promise<void> {
  await hf.transaction(async (tx) => {
    const same: Transaction<PoolClient> = tx;
    const got: boolean = await tx.tryLock(one);
    const statement: Statement = sql`SELECT ${1} FROM ${sql.id("a", "b")} ${sql.raw("")} ${sql.join([1, 2])}`;
    const [row] = await tx.query<{ n: number }>(statement);
    const n: number | undefined = row?.n;
    // @ts-expect-error text is no statement: values would be written into it
    await tx.query("SELECT 1");
    // @ts-expect-error the client of a transaction does not change
    tx.client = undefined as never;
    return [same, got, n];
  });
}

export async function onces(): Promise<void> {
  const done: OnceResult<number> = await once(hf, "evt_1", async () => 1);
  const value: number = (await once(hf, ["stripe", 42, 42n], async () => 1, { payload: { a: 1 } })).value;
  const body = async (tx: Transaction<PoolClient>) => void (await tx.client.query("SELECT 1"));
  await once(hf, "evt_1", body, { wait: 100, keepFor: 5000, retry: false });
  await hf.transaction((tx) => once(hf, "evt_1", async () => {}, { tx, issuedAt: new Date() }));
  const skipped = await once(hf, "evt_1", async () => 1, { wait: "skip" });
  // @ts-expect-error there is a value only if it is done
  void skipped.value;
  if (skipped.status === "done") {
    const checked: number = skipped.value;
    void checked;
  }
  // @ts-expect-error an id that may be missing would be everybody's
  await once(hf, ["stripe", undefined], async () => 1);
  // @ts-expect-error a key is a lock, not an id
  await once(hf, one, async () => 1);
  // @ts-expect-error a typo
  await once(hf, "evt_1", async () => 1, { keepfor: 5000 });
  // @ts-expect-error its isolation is not a choice
  await once(hf, "evt_1", async () => 1, { isolation: "serializable" });
  // @ts-expect-error a Date, since numbers may be seconds
  await once(hf, "evt_1", async () => 1, { issuedAt: 1_700_000_000 });
  // @ts-expect-error a body that is not async may have forgotten what it started
  await once(hf, "evt_1", () => 1);
  // @ts-expect-error the client itself is no transaction
  await once(hf, "evt_1", async () => 1, { tx: new Pool() });
  void [done, value];
}

export async function shards(): Promise<void> {
  const databases = [fromPg(new Pool()), fromPg(new Pool())] as const;
  const many: Sharded<PoolClient> = sharded((of: Key) => databases[of.parts[1] === "1" ? 1 : 0], {
    wait: 100,
  });
  const home: Holdfast<PoolClient> = many.on([one, shared(one)]);
  const rows = await many.transaction({ lock: one }, (tx) => tx.client.query<{ n: number }>("SELECT 1 AS n"));
  const n: number | undefined = rows.rows[0]?.n;
  await many.tryLock(one, async () => 1, { separate: true });
  await using held: Held | undefined = await many.hold(one, { wait: "skip" });
  // @ts-expect-error its lock chooses the shard
  await many.transaction({ wait: 100 }, async () => {});
  // @ts-expect-error and must be there
  await many.transaction(async () => {});
  // @ts-expect-error a string is no key
  many.on("upload");
  // @ts-expect-error the route returns what an adapter returns
  sharded(() => new Pool());
  // @ts-expect-error and not a promise of it
  sharded(async () => databases[0]);
  // @ts-expect-error a typo
  sharded(() => databases[0], { wiat: 100 });
  void [home, n, held];
}

interface Account {
  id: number;
  owner: string;
  balance: number;
}

export async function rowLocks(): Promise<void> {
  await hf.transaction(async (tx) => {
    const [first] = await tx.rows<Account>("account", [1, 2], { for: "no key update", wait: "skip" });
    const balance: number | undefined = first?.balance;
    const picked = await tx.rows<Account, "id" | "balance">(
      "account",
      { owner: "x" },
      { columns: ["id", "balance"] },
    );
    // @ts-expect-error it was not asked for
    void picked[0]?.owner;
    const missing: readonly unknown[] = picked.missing;
    const row: Account = await tx.row<Account>("account", 1);
    const maybe: Account | undefined = await tx.row<Account>("account", 1, { wait: "skip" });
    // @ts-expect-error with "skip" there may be none
    const sure: Account = await tx.row<Account>("account", 1, { wait: "skip" });
    const [nothing, accounts, others] = await tx.lockAll([
      one,
      rows<Account>("account", [1]),
      rows("other", ["a"]),
    ]);
    const none: undefined = nothing;
    const owner: string | undefined = accounts[0]?.owner;
    const anything: unknown = others[0]?.["whatever"];
    const free: boolean = await tx.table("account", "exclusive", { wait: "skip" });
    const locked: boolean = await tx.lock(one, { wait: "skip" });
    // @ts-expect-error no such strength
    await tx.rows("account", [1], { for: "delete" });
    // @ts-expect-error no such mode
    await tx.table("account", "update");
    // @ts-expect-error a typo
    await tx.rows("account", [1], { ordrBy: "id" });
    // @ts-expect-error a key that may be missing would be nobody's
    await tx.rows("account", [undefined]);
    void [balance, missing, row, maybe, sure, none, owner, anything, free, locked];
  });
}

export async function versions(): Promise<void> {
  const accounts = versioned<Account>(hf, "account", { version: "rev" });
  const row: Account = await accounts.update(1, ({ balance }) => ({ balance: balance - 1 }));
  await accounts.update(1, (now) => (now.balance > 0 ? { balance: 0 } : undefined));
  await accounts.updateAll([1, 2], ([a, b]) => [{ balance: b?.balance ?? 0 }, { balance: a?.balance ?? 0 }]);
  await accounts.updateAfter(
    1,
    async ({ owner }) => owner.length,
    (now, length, tx) => (tx.attempt > 1 ? undefined : { balance: now.balance + length }),
  );
  // @ts-expect-error no such column
  await accounts.update(1, () => ({ blance: 1 }));
  void row;
}

export async function leases(): Promise<void> {
  await using lease: Lease = await hf.lease(one, { ttl: 5000, wait: 100, atLeastFor: 10, renew: false });
  await hf.lease(shared(one), { signal: lease.signal, holder: "me" });
  const skipped = await hf.lease(one, { wait: "skip" });
  // @ts-expect-error it may not have been free
  await skipped.release();
  await skipped?.release();
  const parts: [number, Date, Date, AbortSignal] = [lease.fence, lease.since, lease.until, lease.signal];
  const found: readonly LeaseInfo[] = await hf.leases(one);
  await hf.transaction((tx) => fenced(tx, lease));
  await fenced(hf.join({} as PoolClient), lease);
  // @ts-expect-error one lease, one key
  await hf.lease([one, one]);
  // @ts-expect-error a string is no key
  await hf.lease("leader");
  // @ts-expect-error a typo
  await hf.lease(one, { tll: 5000 });
  // @ts-expect-error milliseconds
  await hf.lease(one, { ttl: "5s" });
  // @ts-expect-error a fence is given, not chosen
  lease.fence = 7;
  // The client's own, too.
  await new Pool().connect().then((client) => fenced(client, lease));
  // @ts-expect-error text is no transaction
  await fenced("tx", lease);
  // @ts-expect-error a session lock has no fence
  await hf.transaction(async (tx) => fenced(tx, await hf.hold(one)));
  void [parts, found];
}

export async function semaphores(): Promise<void> {
  const semaphore: Semaphore = hf.semaphore(one, { permits: 5, ttl: 5000, wait: 100 });
  await using permit: Permit = await semaphore.acquire({ permits: 2 });
  const skipped = await semaphore.acquire({ wait: "skip" });
  // @ts-expect-error it may not have been free
  await skipped.release();
  const value: number = await semaphore.use(async ({ fence }) => fence, { wait: 100 });
  await hf.transaction((tx) => fenced(tx, permit));
  // @ts-expect-error how many is what a semaphore is about
  hf.semaphore(one, {});
  // @ts-expect-error a semaphore is not shared
  hf.semaphore(shared(one), { permits: 5 });
  // @ts-expect-error a typo
  hf.semaphore(one, { permits: 5, tll: 1 });
  // @ts-expect-error what is skipped has no value
  await semaphore.use(async () => 1, { wait: "skip" });
  // @ts-expect-error a body that is not async may have forgotten what it started
  await semaphore.use(() => 1);
  void value;
}
