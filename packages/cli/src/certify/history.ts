/** A few sessions at the same time, and whether what they were told can be explained by one call after the other. */
import { setTimeout as sleep } from "node:timers/promises";
import { failureOf } from "holdfast";
import { type HistoryReport, type Recorder, checkHistory, models, recorder } from "holdfast/testing";
import { NoAnswer } from "../within.ts";
import type { Caller } from "./caller.ts";
import { type Kit, longMs } from "./kit.ts";
import { type Ground, type Seen, no, unknown, yes } from "./probe.ts";

const sessions = 4;
/** Of each session. */
const calls = 8;
/** Fewer than are asked for: so that the limit is met. */
const limit = 20;
const runMs = 20_000;
const checkMs = 10_000;

const counterRow = 12;
const registerRow = 13;

/** Of these nothing was kept. */
class Refused extends Error {}

export async function counterHistory(ground: Ground): Promise<Seen> {
  const { kit, atCommit } = ground;
  const key = ground.key();
  await reset(ground, counterRow);
  const history = await play(ground, async (caller, record, who) => {
    const take = () => (atCommit ? takeAtCommit(kit, caller, key) : takeOne(kit, caller, key));
    await record("counter", "take", undefined, take, who);
    // Elsewhere what is read outside of a lock may be late, and nobody promises otherwise.
    if (!atCommit) await record("counter", "read", undefined, () => kit.read(caller, counterRow), who);
  });
  return told(checkHistory(history, models.counter({ limit }), { maxMs: checkMs }));
}

/** All but one of those that have the lock at once are undone at COMMIT, and run again: as Holdfast does. */
async function takeAtCommit(kit: Kit, caller: Caller, key: number): Promise<boolean> {
  for (const since = performance.now(); ;)
    try {
      return await takeOne(kit, caller, key);
    } catch (error) {
      if (!isDefinite(error) || performance.now() - since > longMs) throw error;
      await kit.end(caller, "ROLLBACK").catch(() => {});
      await sleep(Math.random() * 20);
    }
}

async function takeOne(kit: Kit, caller: Caller, key: number): Promise<boolean> {
  for (const since = performance.now(); (await kit.open(caller, key, longMs)) !== "granted";) {
    if (performance.now() - since > longMs) throw new Refused("no lock");
    await sleep(Math.random() * 10);
  }
  const used = (await kit.read(caller, counterRow)) ?? 0;
  if (used < limit) await kept(kit.write(caller, counterRow, used + 1));
  await kept(kit.end(caller, "COMMIT"));
  return used < limit;
}

async function kept(work: Promise<string>): Promise<void> {
  const done = await work;
  if (done !== "done") throw new Refused(done);
}

export async function registerHistory(ground: Ground): Promise<Seen> {
  const { kit, atCommit } = ground;
  await reset(ground, registerRow);
  let next = 0;
  const history = await play(ground, async (caller, record, who) => {
    const read = () => kit.read(caller, registerRow);
    const from = atCommit ? await read() : await record("register", "read", undefined, read, who);
    const to = ++next;
    const swap = async (): Promise<boolean> => {
      const done = await kit.swap(caller, registerRow, from ?? -1, to);
      if (done === "busy") throw new Refused(done);
      return done === "done";
    };
    await record("register", "compareAndSet", { from, to }, swap, who);
  });
  return told(checkHistory(history, models.register({ initial: 0 }), { maxMs: checkMs }));
}

async function reset({ kit, caller, atCommit }: Ground, row: number): Promise<void> {
  await kit.write(await caller(), row, 0);
  if (!atCommit) return;
  const other = await caller();
  for (const since = performance.now(); (await kit.read(other, row)) !== 0; await sleep(20))
    if (performance.now() - since > longMs) return;
}

/** Nothing of it was kept. */
function isDefinite(error: unknown): boolean {
  const kind = failureOf(error)?.kind;
  return error instanceof Refused || kind === "serialization" || kind === "deadlock";
}

type Turn = (caller: Caller, record: Recorder, options: { readonly process: string }) => Promise<void>;

async function play({ kit, caller }: Ground, turn: Turn) {
  const record = recorder(undefined, { definite: isDefinite });
  const until = performance.now() + runMs;
  const session = async (process: string): Promise<void> => {
    const own = await caller();
    for (let i = 0; i < calls && performance.now() < until; i++) {
      try {
        await turn(own, record, { process });
      } catch (error) {
        // It is in the history.
        await kit.end(own, "ROLLBACK").catch(() => {});
        if (error instanceof NoAnswer || failureOf(error)?.kind === "lost") return;
      }
    }
  };
  await Promise.all(Array.from({ length: sessions }, (_, i) => session(`session ${i + 1}`)));
  return record.history();
}

function told({ verdict, operations, unknown: open, text }: HistoryReport): Seen {
  const seen = `${operations} calls of ${sessions} sessions, ${open} of unknown outcome`;
  if (operations - open < sessions * calls) return unknown(`${seen}: too few came back to tell`);
  if (verdict === "ok") return yes(`${seen}: there is an order that explains them all`);
  return verdict === "violation" ? no(text) : unknown(`${seen}: not decided in time`);
}
