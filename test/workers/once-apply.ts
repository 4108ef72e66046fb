/** One process of many: handles the same messages as all the others, in an order of its own. */
import { setTimeout as sleep } from "node:timers/promises";
import { type Transaction, holdfast, once, sql } from "holdfast";
import { backendNamed } from "../backends.ts";
import { random } from "../harness/random.ts";
import type { WorkerContext } from "../harness/worker-protocol.ts";

export interface ApplyArg {
  backend: string;
  url: string;
  seed: number;
  ids: number;
  callers: number;
  /** "look, then write": without a lock. "record later": in a transaction of its own, after the effect's. */
  form: "once" | "look, then write" | "record later";
}

/** What each id was answered with. */
export type ApplyResult = Record<string, string>;

export default async function apply(
  { backend, url, seed, ids, callers, form }: ApplyArg,
  context: WorkerContext,
): Promise<ApplyResult> {
  const next = random(seed);
  const order = Array.from({ length: ids }, (_, i) => ({ id: `id-${i}`, at: next() }))
    .toSorted((a, b) => a.at - b.at)
    .map(({ id }) => id);
  const site = await backendNamed(backend).open(url);
  const hf = holdfast(site.database, { wait: 60_000, deadline: 110_000 });
  const result: ApplyResult = {};
  let runs = 0;
  const effect = async (tx: Transaction<unknown>, id: string): Promise<string> => {
    const answer = `${process.pid}-${++runs}`;
    await tx.query(sql`INSERT INTO effect (id, part, answer) VALUES (${id}, ${1}, ${answer})`);
    if (form !== "record later") context.send("inside");
    await sleep(next() * 6);
    await tx.query(sql`INSERT INTO effect (id, part, answer) VALUES (${id}, ${2}, ${answer})`);
    return answer;
  };
  const handle = {
    once: async (id: string) => (await once(hf, ["test", id], (tx) => effect(tx, id))).value,
    "look, then write": (id: string) =>
      hf.transaction(async (tx) => {
        const known = await look(tx, id);
        if (known !== undefined) return known;
        const answer = await effect(tx, id);
        await note(tx, id, answer);
        return answer;
      }),
    "record later": async (id: string) => {
      const known = await hf.transaction((tx) => look(tx, id));
      if (known !== undefined) return known;
      const answer = await hf.transaction((tx) => effect(tx, id));
      context.send("inside");
      // Long enough for the news to come back as a SIGKILL.
      await sleep(100);
      await hf.transaction((tx) => note(tx, id, answer));
      return answer;
    },
  }[form];
  await hf.capabilities();
  context.send("ready");
  await context.receive("go");
  const caller = async (): Promise<void> => {
    for (let id = order.pop(); id !== undefined; id = order.pop()) result[id] = await handle(id);
  };
  await Promise.all(Array.from({ length: callers }, caller));
  await site.close();
  return result;
}

async function look(tx: Transaction<unknown>, id: string): Promise<string | undefined> {
  const [row] = await tx.query<{ answer: string }>(sql`SELECT answer FROM handled WHERE id = ${id}`);
  return row?.answer;
}

async function note(tx: Transaction<unknown>, id: string, answer: string): Promise<void> {
  await tx.query(sql`INSERT INTO handled (id, answer) VALUES (${id}, ${answer})`);
}
