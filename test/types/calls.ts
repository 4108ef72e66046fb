/** Compiled, never run: what calls take, what they refuse, and what they return. */
import {
  type Capabilities,
  type Failure,
  type Held,
  type Holdfast,
  type Key,
  type Statement,
  type Transaction,
  type TryLockResult,
  holdfast,
  isRetryable,
  key,
  shared,
  sql,
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
