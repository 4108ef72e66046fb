/** A process that has no time: its event loop is blocked again and again, while somebody ends its sessions. It has to live. */
import { holdfast, key, leader, sql } from "holdfast";
import { queue } from "holdfast/queue";
import { schedule } from "holdfast/schedule";
import { backendNamed } from "../backends.ts";
import { eventually } from "../harness/wait.ts";
import type { WorkerContext } from "../harness/worker-protocol.ts";

export interface BusyArg {
  backend: string;
  url: string;
  /** Whether its engine has queues and schedules. */
  patterns: boolean;
}

const sleep = (ms: number) => new Promise((resolve) => setTimeout(resolve, ms));

export default async function busy(
  { backend, url, patterns }: BusyArg,
  { send, receive }: WorkerContext,
): Promise<Record<string, number>> {
  const site = await backendNamed(backend).open(url);
  const hf = holdfast(site.database, { wait: 2000 });
  const { sessionLocks } = await hf.capabilities();
  /** How often each of them did something. */
  const done: Record<string, number> = {};
  const did = (what: string) => (done[what] = (done[what] ?? 0) + 1);
  let over = false;
  const again = async (what: string, work: () => Promise<unknown>) => {
    while (!over)
      try {
        await work();
        did(what);
        await sleep(5);
      } catch {
        // Its session was ended, or none was to be had.
        await sleep(20);
      }
  };
  const quiet = () => {};
  const ended: Promise<unknown>[] = [];
  const jobs = ["plain", "transactional"].map((name) => queue<number>(hf, name, { backoff: { maxMs: 50 } }));
  if (patterns) {
    const [plain, transactional] = jobs;
    plain?.work(() => did("plain"), { onTrouble: quiet, pollMs: 50, ttlMs: 2000 });
    transactional?.work(() => did("transactional"), { transactional: true, onTrouble: quiet, pollMs: 50 });
    const options = { every: 100, ttl: 2000, onError: quiet } as const;
    // It may be that its first call is answered by nobody.
    const start = async (of: ReturnType<typeof schedule>) => {
      while (
        !over &&
        (await of.start().then(
          () => false,
          () => true,
        ))
      )
        await sleep(20);
    };
    void start(schedule(hf, "busy", options, () => did("schedule")));
    for (const each of jobs) ended.push(again("enqueue", () => each.enqueue(1)));
  }
  leader(
    hf,
    "busy",
    async ({ signal }) => {
      while (!signal.aborted) {
        did("leader");
        await sleep(20);
      }
    },
    { ttl: 2000, onError: quiet },
  );
  for (let i = 0; i < 2; i++) {
    ended.push(
      again("hold", async () => {
        await using _ = await hf.hold(key("busy", i));
        await sleep(20);
      }),
      again("transaction", () =>
        hf.transaction({ lock: key("locked", i) }, async (tx) => {
          await tx.query(sql`SELECT 1 AS one`);
          await sleep(5);
          await tx.query(sql`SELECT 2 AS two`);
        }),
      ),
    );
  }
  // In pieces, so that what has come meanwhile comes all at once: a connection, and its end.
  const blocking = setInterval(() => {
    for (const until = performance.now() + 120; performance.now() < until;);
  }, 130);
  send("ready");
  await receive("calm");
  clearInterval(blocking);
  // Whatever was lost, everything is done again.
  const before = { ...done };
  const all = ["transaction", "leader"];
  if (typeof sessionLocks === "string") all.push("hold");
  if (patterns) all.push("plain", "transactional", "schedule", "enqueue");
  await eventually(() => all.every((what) => (done[what] ?? 0) > (before[what] ?? 0) + 2), {
    timeout: 60_000,
  }).catch(() => {
    throw new Error(`Not everything is done again: ${JSON.stringify({ before, done })}`);
  });
  over = true;
  await Promise.all(ended);
  await hf.close();
  await site.close();
  return done;
}
