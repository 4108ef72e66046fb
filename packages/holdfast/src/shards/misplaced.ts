/** What `renumber()` would leave behind: stock and jobs that are on one database, and that a new route looks for on another. */
import type { Connection, Database } from "../seam/database.ts";
import { isSupported } from "../seam/capabilities.ts";
import { UsageError, some } from "../seam/errors.ts";
import { type Key, key } from "../seam/key.ts";
import type { How } from "../seam/store.ts";
import { withConnection } from "../transaction/one-shot.ts";

/** What may stay where it is. */
export type Left = "stock" | "jobs";
export const leavable: readonly unknown[] = ["stock", "jobs"] satisfies Left[];

const page = 1000;
const how: How = { waitMs: 5000, free: true };

const remedy = {
  stock: "They would have no stock there, and ids of their movements would count again",
  jobs: "Limits of their groups would not hold, and a job with the same key would be added again",
} satisfies { readonly [what in Left]: string };

/** Throws if there is something. */
export async function refuseMisplaced(
  databases: readonly Database<unknown, Connection>[],
  route: (key: Key) => number,
  show: (name: string) => string,
  leave: readonly Left[],
): Promise<void> {
  for (const what of ["stock", "jobs"] as const) {
    if (leave.includes(what)) continue;
    let count = 0;
    const first: string[] = [];
    for (const [number, database] of databases.entries())
      for await (const one of what === "stock" ? skusOf(database) : jobsOf(database)) {
        const astray = one.filter((each) => route(each) !== number);
        if (astray.length === 0) continue;
        count++;
        if (first.length < 3)
          first.push(`${some(astray.map(({ name }) => show(name)))} (on shard ${number})`);
      }
    if (count > 0)
      throw new UsageError(
        `renumber: this route leads elsewhere than they are for ${count} ${what === "stock" ? "levels of stock" : "jobs"}, such as ${some(first)}. ${remedy[what]}. ` +
          `Choose a route that leaves them where they are, or accept it: renumber({ leave: ["${what}"] })`,
      );
  }
}

async function* skusOf(database: Database<unknown, Connection>): AsyncGenerator<readonly Key[]> {
  const { stock } = database.engine;
  if (!isSupported(stock)) return;
  const { lists } = stock;
  const books = await withConnection({ database }, async (c) => lists.books(c, how));
  for (const { name } of books) {
    const book = { name, table: undefined };
    type Levels = Awaited<ReturnType<typeof lists.levels>>;
    for (let after: Levels[number] | undefined, more = true; more; more = after !== undefined) {
      const from = { skus: undefined, location: undefined, after, most: page };
      const levels: Levels = await withConnection({ database }, async (c) =>
        lists.levels(c, book, from, how),
      );
      for (const { sku } of levels) yield [key(name, sku)];
      after = levels.at(page - 1);
    }
  }
}

async function* jobsOf(database: Database<unknown, Connection>): AsyncGenerator<readonly Key[]> {
  const { queues } = database.engine;
  if (!isSupported(queues)) return;
  const { lists } = queues;
  const all = await withConnection({ database }, (c) => lists.queues(c, undefined));
  for (const { name } of all)
    for (const state of ["waiting", "delayed", "running", "failed"] as const)
      for (let after: string | undefined, more = true; more; more = after !== undefined) {
        const from = { state, after, most: page };
        const found: Awaited<ReturnType<typeof lists.jobs>> = await withConnection({ database }, (c) =>
          lists.jobs(c, name, from),
        );
        for (const job of found?.jobs ?? [])
          yield [job.group, job.key].flatMap((part) => (part === undefined ? [] : [key(name, part)]));
        after = found?.next;
      }
}
