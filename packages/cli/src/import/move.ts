/** Moves jobs of another library into queues of Holdfast: all in one transaction. */
import { UsageError } from "holdfast";
import { type Enqueued, queue } from "holdfast/queue";
import { type Row, type Server, safePath } from "../server.ts";
import type { Ask, Peer, TheirJob } from "./peer.ts";

/** Of one queue. */
export interface Moved {
  readonly from: string;
  readonly to: string;
  readonly waiting: number;
  readonly scheduled: number;
  readonly retrying: number;
  /** Stayed where they were: there is a job with that key in Holdfast's queue. */
  readonly keyTaken: number;
  /** Stayed where they were: Holdfast's queue cannot have them, and why. */
  readonly unfit: readonly { readonly id: string; readonly why: string }[];
}

export interface Route {
  readonly from: string;
  readonly to: string;
}

/** How many are read, added and removed at a time. */
const atOnce = 1000;
/** Of payloads that are sent together, in characters. */
const together = 8 * 1024 * 1024;

export const totalOf = ({ waiting, scheduled, retrying }: Omit<Moved, "from" | "to">): number =>
  waiting + scheduled + retrying;

export async function move(
  { hf, own }: Server,
  peer: Peer,
  schema: string,
  routes: readonly Route[],
  { signal, deadline, moved }: { signal: AbortSignal; deadline: number; moved: (n: number) => void },
): Promise<Moved[]> {
  // A queue that is new is made before: others who meet it first would wait for the end of all this.
  for (const { to } of routes) await queue(hf, to).counts();
  return hf.transaction({ signal, deadline }, async (tx) => {
    const client = tx.client as {
      query(text: string, values: readonly unknown[]): Promise<{ readonly rows: Row[] }>;
    };
    const ask: Ask = async (text, values = []) => (await client.query(text, values)).rows;
    await ask(safePath);
    const all: Moved[] = [];
    let before = 0;
    for (const { from, to } of routes) {
      const sums = { waiting: 0, scheduled: 0, retrying: 0, keyTaken: 0 };
      const unfit: { id: string; why: string }[] = [];
      const passed: string[] = [];
      const taking = await peer.take(ask, schema, from);
      for (;;) {
        const theirs = await taking.next(atOnce, passed);
        const added: TheirJob[] = [];
        for (const part of parts(theirs)) {
          const outcomes = await add(part, (jobs) => queue(hf, to).enqueueMany(jobs.map(ours), { tx }));
          const again: { job: TheirJob; id: number }[] = [];
          for (const [i, job] of part.entries()) {
            const outcome = outcomes[i];
            if (outcome && "added" in outcome && outcome.added) {
              added.push(job);
              if (job.failures > 0) again.push({ job, id: outcome.id });
              sums[job.failures > 0 ? "retrying" : job.runAt ? "scheduled" : "waiting"] += 1;
              continue;
            }
            passed.push(job.id);
            if (outcome && "why" in outcome) unfit.push({ id: job.id, why: outcome.why });
            else sums.keyTaken += 1;
          }
          await countFailures(ask, own, to, again);
        }
        await taking.remove(added.map(({ id }) => id));
        moved(before + totalOf({ ...sums, unfit }));
        // Who adds to it all the time would keep us here.
        if (theirs.length < atOnce) break;
      }
      before += totalOf({ ...sums, unfit });
      all.push({ from, to, ...sums, unfit });
    }
    return all;
  });
}

const ours = ({ payload, priority, runAt, key, group }: TheirJob) => ({
  payload: payload ?? null,
  priority,
  ...(runAt && { runAt }),
  ...(key !== undefined && { key }),
  ...(group !== undefined && { group }),
});

function* parts(jobs: readonly TheirJob[]): Generator<TheirJob[]> {
  let part: TheirJob[] = [];
  let size = 0;
  for (const job of jobs) {
    const own = (JSON.stringify(job.payload) as string | undefined)?.length ?? 0;
    if (part.length > 0 && size + own > together) {
      yield part;
      [part, size] = [[], 0];
    }
    part.push(job);
    size += own;
  }
  if (part.length > 0) yield part;
}

type Outcome = Enqueued | { readonly why: string };

/** What one of them has that cannot be is refused before anything is sent: it is found by halves. */
async function add(
  jobs: readonly TheirJob[],
  enqueue: (jobs: readonly TheirJob[]) => Promise<readonly Enqueued[]>,
): Promise<readonly Outcome[]> {
  try {
    return await enqueue(jobs);
  } catch (error) {
    if (!(error instanceof UsageError)) throw error;
    if (jobs.length === 1) return [{ why: error.message.replace(/^enqueue\w*: /, "") }];
    const half = Math.ceil(jobs.length / 2);
    return [...(await add(jobs.slice(0, half), enqueue)), ...(await add(jobs.slice(half), enqueue))];
  }
}

/** A job that has failed before has so many retries less. Nobody else sees these rows yet. */
async function countFailures(
  ask: Ask,
  own: (name: string) => string,
  queueName: string,
  jobs: readonly { readonly job: TheirJob; readonly id: number }[],
): Promise<void> {
  if (jobs.length === 0) return;
  const values = [
    queueName,
    jobs.map(({ id }) => id),
    jobs.map(({ job }) => job.priority),
    jobs.map(({ job }) => Math.min(job.failures, 32_767)),
    jobs.map(({ job }) => job.group ?? null),
  ];
  const found = {
    queue_ready: "t.priority = u.priority AND t.id = u.id",
    queue_delayed: "t.id = u.id",
    queue_grouped: "t.grp = u.grp AND t.priority = u.priority AND t.id = u.id",
  };
  for (const [table, condition] of Object.entries(found))
    await ask(
      `UPDATE ${own(table)} t SET attempt = u.failures
        FROM unnest($2::bigint[], $3::smallint[], $4::smallint[], $5::text[]) u (id, priority, failures, grp)
        WHERE t.queue = (SELECT q.id FROM ${own("queue")} q WHERE q.name = $1) AND ${condition}`,
      values,
    );
}
