/** A session that ends while its body is at something else: every client that can tell does so at once. */
import { holdfast, key, sql } from "holdfast";
import { execute } from "holdfast/testing";
import { expect, test } from "vitest";
import { backends } from "./backends.ts";
import { placeFor, missing } from "./harness/places.ts";
import { eventually } from "./harness/wait.ts";

/** Kysely has no event for it, and one Client has no other connection to look on. Where locks are rows, nobody sees the first holder. */
const silent = /^Kysely( on M.*)?$|one Client|without advisory locks/;

test.for(
  backends.filter(({ name, server }) => /^(?:postgres|mysql|mariadb)$/.test(server) && !silent.test(name)),
)("$name", async (backend, { skip }) => {
  skip(missing(backend) !== undefined, missing(backend));
  const place = await placeFor(backend);
  const [site, other] = [await backend.open(place.url), await backend.open(place.url)];
  const hf = holdfast(site.database);
  try {
    await hf.migrate();
    let runs = 0;
    const done = hf.transaction({ lock: key("idle"), retry: false, deadline: 60_000 }, async (tx) => {
      runs++;
      const { holders } = await hf.outside(() => hf.inspect());
      const id = Number(holders.find(({ name }) => name.startsWith("idle"))?.session.id);
      const end = backend.server === "postgres" ? `SELECT pg_terminate_backend(${id})` : `KILL ${id}`;
      await execute(other, sql.raw(end));
      await hf.outside(() => eventually(() => tx.signal.aborted));
      throw tx.signal.reason;
    });
    await expect(done).rejects.toMatchObject({ code: "HF_CONNECTION_LOST" });
    expect(runs).toBe(1);
  } finally {
    await hf.close();
    await site.close();
    await other.close();
    await place.drop();
  }
});
