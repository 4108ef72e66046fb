/** The conformance suite of queues on the generic store: on PostgreSQL with locks by rows, and on an engine that has nothing but a dialect. */
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fromPg } from "holdfast/pg";
import { type ConformanceSite, type Ground, conformance, prepare } from "holdfast/testing";
import { Pool } from "pg";
import { afterAll, beforeAll, describe, test } from "vitest";
import { createDatabase, unavailable } from "./harness/databases.ts";
import { bareQueues, generic } from "./sketches/generic-queues.ts";

interface Open {
  readonly sites: readonly [ConformanceSite, ConformanceSite];
  close(): Promise<void>;
}

/** The suite of queues joins nobody's transaction. */
const site = (database: unknown): ConformanceSite => {
  const refuse = () => Promise.reject(new Error("not needed by this suite"));
  return {
    database: database as ConformanceSite["database"],
    ownTransaction: refuse,
    withIdle: refuse,
    send: refuse,
    close: async () => {},
  };
};

const backends: readonly { name: string; why: () => string | undefined; open: () => Promise<Open> }[] = [
  {
    name: "PostgreSQL, by the generic store",
    why: () => unavailable("postgres"),
    async open() {
      const database = await createDatabase("postgres");
      const pools = [1, 2].map(() => new Pool({ connectionString: database.url, max: 10 }));
      const [one, two] = pools.map((pool) => site(generic(fromPg(pool), "rows"))) as [
        ConformanceSite,
        ConformanceSite,
      ];
      return {
        sites: [one, two],
        async close() {
          for (const pool of pools) await pool.end();
          await database.drop();
        },
      };
    },
  },
  {
    name: "an engine with nothing but a dialect",
    why: () => undefined,
    async open() {
      const folder = await mkdtemp(join(tmpdir(), "holdfast-queue-"));
      const file = join(folder, "queues.db");
      return {
        sites: [site(bareQueues(file)), site(bareQueues(file))],
        close: () => rm(folder, { recursive: true }),
      };
    },
  },
];

const cases = conformance().filter(({ suite }) => suite === "queue");

describe.each(backends)("$name", ({ why: reason, open }) => {
  const why = reason();
  let opened: Open;
  let ground: (name: string) => Promise<Ground>;

  beforeAll(async () => {
    if (why !== undefined) return;
    opened = await open();
    ground = await prepare(...opened.sites);
  });

  afterAll(() => opened?.close());

  for (const { name, run } of cases)
    test(`queue: ${name}`, async ({ skip }) => {
      skip(why !== undefined, why);
      await run(await ground("queue"));
    });
});
