/** One process of many that hammer the same few things, and write down what they called and what they were told. */
import { setTimeout as sleep } from "node:timers/promises";
import {
  type Holdfast,
  type Lease,
  StaleFenceError,
  type Transaction,
  fenced,
  holdfast,
  key,
  once,
  sql,
  versioned,
} from "holdfast";
import { fromPg } from "holdfast/pg";
import { type Recorder, recorder } from "holdfast/testing";
import { Pool, type PoolClient } from "pg";
import { random } from "../harness/random.ts";
import type { WorkerContext } from "../harness/worker-protocol.ts";

export type StressKind = "counter" | "lock" | "lease" | "version" | "once";

export interface StressArg {
  url: string;
  file: string;
  /** Who this is, in the history. */
  process: string;
  seed: number;
  /** Of each kind. */
  callers: number;
  kinds: readonly { kind: StressKind; keys: readonly string[]; calls: number }[];
  /** Looks, pauses, and writes, without a lock. */
  naive: boolean;
}

export const limit = 12;
export const leaseTtl = 400;

class Conflict extends Error {}

interface Caller {
  readonly hf: Holdfast<PoolClient>;
  readonly record: Recorder;
  /** As the history calls it. */
  readonly who: string;
  readonly naive: boolean;
  readonly next: () => number;
}

type Act = (caller: Caller, at: string, call: number) => Promise<void>;

const acts: Record<StressKind, Act> = { counter, lock, lease, version, once: message };

export default async function stress(arg: StressArg, context: WorkerContext): Promise<void> {
  const record = recorder(arg.file, { process: arg.process });
  const next = random(arg.seed);
  // Waiting for a lock takes a connection.
  const pool = new Pool({ connectionString: arg.url, max: arg.callers * arg.kinds.length + 5 });
  pool.on("error", () => {});
  const hf = holdfast(fromPg(pool), { wait: 20_000, deadline: 30_000 });
  await hf.capabilities().catch(() => {});
  context.send("ready");
  await context.receive("go");
  const hammer = async ({ kind, keys, calls }: StressArg["kinds"][number]): Promise<void> => {
    let left = calls;
    const work = async (index: number): Promise<void> => {
      const caller: Caller = { hf, record, who: `${arg.process}/${index}`, naive: arg.naive, next };
      while (left-- > 0) {
        // Those who look, then write, must come to the same keys at the same time, or they would not be found out.
        const which = arg.naive ? left % keys.length : Math.floor(next() * keys.length);
        const at = keys[which] as string;
        // What became of it is in the history.
        await acts[kind](caller, at, left).catch(() => sleep(2));
      }
    };
    await Promise.all(Array.from({ length: arg.callers }, (_, i) => work(i)));
  };
  await Promise.all(arg.kinds.map(hammer));
  await hf.close().catch(() => {});
  record.close();
}

/** A quota that is checked in the application. */
async function counter({ hf, record, who, naive, next }: Caller, at: string): Promise<void> {
  const chance = next();
  if (chance < 0.2) {
    const read = () => hf.transaction((tx) => used(tx, at));
    await record(at, "read", undefined, read, { process: who });
    return;
  }
  const n = 1 + Math.floor(next() * 2);
  const call = chance < 0.65 ? "take" : "refund";
  const move = () =>
    hf.transaction(naive ? {} : { lock: key("quota", at) }, async (tx) => {
      const after = (await used(tx, at)) + (call === "take" ? n : -n);
      if (next() < 0.5 || naive) await sleep(next() * 4);
      if (after > limit || after < 0) return false;
      await tx.query(sql`UPDATE quota SET used = ${after} WHERE id = ${at}`);
      return true;
    });
  await record(at, call, n, move, { process: who });
}

async function used(tx: Transaction<unknown>, at: string): Promise<number> {
  const [row] = await tx.query(sql`SELECT used FROM quota WHERE id = ${at}`);
  return Number(row?.used);
}

async function lock({ hf, record, who, naive, next }: Caller, at: string, call: number): Promise<void> {
  // Another one each time: what is lost with a connection is one hold, not those that come later.
  const owner = { owner: `${who}#${call}` };
  const acquire = async () => {
    if (!naive) return hf.hold(key("mutex", at));
    await sleep(next() * 4);
    return { release: async () => {} };
  };
  const held = await record(at, "acquire", owner, acquire, { process: who, output: () => true });
  await sleep(next() * 3);
  // That it was lost is told by an error; since when is not.
  await record(at, "release", owner, () => held.release(), { process: who, definite: () => false });
}

async function lease(caller: Caller, at: string, call: number): Promise<void> {
  const { hf, record, who, naive, next } = caller;
  const as = { process: who };
  if (next() < 0.2) {
    await record(at, "read", undefined, () => hf.transaction((tx) => document(tx, at)), as);
    return;
  }
  const acquire = () => (naive ? numbered(caller, at) : hf.lease(key("doc", at), { ttl: leaseTtl }));
  // The answer may be lost after the grant.
  const granted = await record(at, "acquire", undefined, acquire, {
    process: who,
    output: ({ fence }) => ({ fence }),
    definite: () => false,
  });
  const { fence } = granted;
  const write = (value: string) => () =>
    unlessStale(() =>
      hf.transaction(async (tx) => {
        if (!naive) await fenced(tx, granted as Lease);
        await tx.query(sql`UPDATE doc SET value = ${value} WHERE id = ${at}`);
      }),
    );
  try {
    for (let i = 0; i < 2; i++) {
      const value = `${who}-${call}-${i}`;
      await record(at, "write", { fence, value }, write(value), as);
    }
  } finally {
    // After a release whose answer was lost, the next attempt says that the lease is no longer ours: it may be the first
    // one that gave it back.
    await record(at, "release", { fence }, () => granted.release(), { process: who, definite: () => false });
  }
}

async function unlessStale(work: () => Promise<void>): Promise<boolean> {
  try {
    await work();
    return true;
  } catch (error) {
    if (error instanceof StaleFenceError) return false;
    throw error;
  }
}

/** What people write: the next number, and nobody asks whether somebody else has it too. */
async function numbered({ hf, next }: Caller, at: string) {
  return hf.transaction(async (tx) => {
    const [row] = await tx.query(sql`SELECT fence FROM doc WHERE id = ${at}`);
    const fence = Number(row?.fence) + 1;
    await sleep(next() * 4);
    await tx.query(sql`UPDATE doc SET fence = ${fence} WHERE id = ${at}`);
    return { fence, release: async () => {} };
  });
}

async function document(tx: Transaction<unknown>, at: string): Promise<unknown> {
  const [row] = await tx.query(sql`SELECT value FROM doc WHERE id = ${at}`);
  return row?.value;
}

type Doc = {
  id: string;
  value: string | null;
  version: number;
};

async function version({ hf, record, who, naive, next }: Caller, at: string, call: number): Promise<void> {
  const as = { process: who };
  const look = () =>
    hf.transaction(async (tx) => {
      const [row] = await tx.query<Doc>(sql`SELECT version, value FROM doc WHERE id = ${at}`);
      return { version: Number(row?.version), value: row?.value ?? null };
    });
  const { version: expected } = await record(at, "read", undefined, look, as);
  await sleep(next() * 2);
  const value = `${who}-${call}`;
  const docs = versioned<Doc>(hf, "doc");
  const update = () =>
    docs.update(at, (now) => {
      if (now.version !== expected) throw new Conflict();
      return { value };
    });
  const careless = () =>
    hf.transaction(async (tx) => {
      const [row] = await tx.query<Doc>(sql`SELECT version FROM doc WHERE id = ${at}`);
      if (Number(row?.version) !== expected) throw new Conflict();
      await sleep(next() * 4);
      await tx.query(sql`UPDATE doc SET value = ${value}, version = version + 1 WHERE id = ${at}`);
      return { version: expected + 1 };
    });
  const save = async () => {
    try {
      return (await (naive ? careless() : update())).version;
    } catch (error) {
      if (error instanceof Conflict) return false;
      throw error;
    }
  };
  await record(at, "update", { expected, value }, save, as);
}

async function message({ hf, record, who, naive, next }: Caller, at: string, call: number): Promise<void> {
  const as = { process: who };
  if (next() < 0.3) {
    const count = () =>
      hf.transaction(async (tx) => {
        const [row] = await tx.query(sql`SELECT count(*) AS n FROM effect WHERE id = ${at}`);
        return Number(row?.n);
      });
    await record(at, "effects", undefined, count, as);
    return;
  }
  const answer = `${who}-${call}`;
  const effect = async (tx: Transaction<unknown>) => {
    await sleep(next() * 3);
    await tx.query(sql`INSERT INTO effect (id, answer) VALUES (${at}, ${answer})`);
    return answer;
  };
  const careless = () =>
    hf.transaction(async (tx) => {
      const [known] = await tx.query(sql`SELECT answer FROM effect WHERE id = ${at}`);
      return known ? { value: known.answer, replayed: true } : { value: await effect(tx), replayed: false };
    });
  const run = async () => {
    const result = naive ? await careless() : await once(hf, ["stress", at], effect);
    return { value: result.value, replayed: result.replayed };
  };
  await record(at, "run", undefined, run, as);
}
