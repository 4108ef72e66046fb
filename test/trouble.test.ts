/** What `onTrouble` of a worker is told: always an error of ours, with the client's own as its cause. */
import { HoldfastError, holdfast } from "holdfast";
import { queue } from "holdfast/queue";
import { expect, test } from "vitest";
import { backends } from "./backends.ts";
import { missing, placeFor } from "./harness/places.ts";
import { eventually } from "./harness/wait.ts";

const chosen = backends.filter(({ name }) =>
  [
    "pg",
    "postgres.js",
    "mysql2 on MariaDB",
    "mariadb on MySQL",
    "better-sqlite3, one Database",
    "node:sqlite, one DatabaseSync",
    "libsql",
    "Knex on SQLite",
    "TypeORM on SQLite",
  ].includes(name),
);

const savepoint = "ROLLBACK TO SAVEPOINT holdfast_job; RELEASE SAVEPOINT holdfast_job".split("; ");

test.for(chosen)("$name", { timeout: 60_000 }, async (backend, { skip }) => {
  skip(missing(backend) !== undefined, missing(backend));
  const place = await placeFor(backend);
  const site = await backend.open(place.url);
  const hf = holdfast(site.database, { hazards: "off" });
  const troubles: unknown[] = [];
  let closing: Promise<void> | undefined;
  const onTrouble = (error: HoldfastError) => void troubles.push(error);
  try {
    await hf.migrate();
    // A handler that ends the savepoint of its job, which then cannot be settled.
    const spoilt = queue(hf, "spoilt");
    await spoilt.enqueue({});
    const handler = async (_: unknown, tx: { readonly client: unknown }) => {
      for (const text of savepoint) await site.send(tx.client, text);
      throw new Error("it failed");
    };
    const worker = spoilt.work(handler, { transactional: true, pollMs: 50, onTrouble });
    await eventually(() => troubles.length > 0);
    await worker.stop({ patienceMs: 0 });
    const before = troubles.length;
    // A client that is closed under its workers.
    const errands = queue(hf, "errands");
    const left = [true, false].map((transactional) =>
      errands.work(async () => {}, { transactional, pollMs: 50, ttlMs: 1000, onTrouble } as never),
    );
    await eventually(async () => (await errands.counts()).workers === 2);
    // Some wait for connections that are in use.
    closing = site.close().catch(() => {});
    await eventually(() => troubles.length > before + 1);
    await Promise.all(left.map((each) => each.stop({ patienceMs: 0 })));
    const raw = troubles.filter((error) => !(error instanceof HoldfastError));
    expect(raw).toEqual([]);
    expect(troubles.map((error) => (error as HoldfastError).code)).not.toContain(undefined);
  } finally {
    await hf.close().catch(() => {});
    await (closing ?? site.close());
    await place.drop();
  }
});
