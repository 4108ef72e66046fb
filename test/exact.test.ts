import { holdfast, key, sql } from "holdfast";
import { execute } from "holdfast/testing";
import { describe, expect, test } from "vitest";
import { type Backend, backendNamed, plainCampaigns } from "./backends.ts";
import { missing, placeFor } from "./harness/places.ts";
import { runWorkers } from "./harness/processes.ts";
import type { ConsumeArg, ConsumeResult } from "./workers/consume.ts";

const worker = new URL("./workers/consume.ts", import.meta.url);
const limit = 100;
const long = process.env["HOLDFAST_LONG"] === "1";
/** One client of each server in full; the others differ by what they send, not by what the server makes of it. */
const inFull = ["pg", "mysql2 on MariaDB", "mysql2 on MySQL", "better-sqlite3"];
const callsOf = ({ name }: Backend) => (long || inFull.includes(name) ? 200 : 20);

async function hammer(
  backend: Backend,
  naive: boolean,
): Promise<{ rows: number; granted: number; refused: number; errors: string[] }> {
  const place = await placeFor(backend);
  try {
    const site = await backend.open(place.url);
    const hf = holdfast(site.database);
    try {
      await hf.migrate();
      await execute(site, sql`CREATE TABLE upload (user_id varchar(40) NOT NULL, bytes integer NOT NULL)`);
      const arg: ConsumeArg = {
        backend: backend.name,
        url: place.url,
        calls: callsOf(backend),
        callers: 4,
        limit,
        naive,
      };
      const results = await runWorkers<ConsumeResult>(worker, 8, arg);
      const [row] = await hf.transaction((tx) => tx.query(sql`SELECT count(*) AS n FROM upload`));
      const sum = (of: (r: ConsumeResult) => number) => results.reduce((total, r) => total + of(r), 0);
      return {
        rows: Number(row?.n),
        granted: sum((r) => r.granted),
        refused: sum((r) => r.refused),
        errors: results.flatMap((r) => r.errors),
      };
    } finally {
      await site.close();
    }
  } finally {
    await place.drop();
  }
}

describe("8 processes × 200 (of some clients 20) check-then-write calls on one user, limit 100", () => {
  test.for(plainCampaigns)("exactly 100 through $name", { timeout: 300_000 }, async (backend, { skip }) => {
    skip(missing(backend) !== undefined, missing(backend));
    const refused = 8 * callsOf(backend) - limit;
    expect(await hammer(backend, false)).toEqual({ rows: limit, granted: limit, refused, errors: [] });
  });

  // The same test without the lock must show the bug, or it would prove nothing.
  test.for(["pg", "mysql2 on MySQL", "mysql2 on MariaDB"].map(backendNamed))(
    "more than 100 through $name without the lock",
    async (backend, { skip }) => {
      skip(missing(backend) !== undefined, missing(backend));
      const { rows } = await hammer(backend, true);
      expect(rows).toBeGreaterThan(limit);
    },
  );
});

describe("users do not wait for each other", () => {
  test.for(plainCampaigns)(
    "99 users pass while one user's lock is held: $name",
    async (backend, { skip }) => {
      skip(missing(backend) !== undefined, missing(backend));
      const place = await placeFor(backend);
      const site = await backend.open(place.url);
      const hf = holdfast(site.database);
      try {
        await hf.migrate();
        const { granularity } = await hf.capabilities();
        const passed = await hf.transaction({ lock: key("user", 0) }, async () => {
          const users = Array.from({ length: granularity === "key" ? 99 : 3 }, (_, i) => key("user", i + 1));
          // Not one waits: "nowait" would throw.
          const enter = (lock: ReturnType<typeof key>) =>
            hf.tryLock(lock, async () => true, { separate: true });
          return Promise.allSettled(users.map(enter));
        });
        // Where the whole database has one writer the matrix says so, and nobody passes, or is told that a lock is taken.
        const answers = new Set(
          passed.map((answer) =>
            answer.status === "fulfilled"
              ? answer.value.acquired
              : (answer.reason as { code?: unknown }).code,
          ),
        );
        expect(answers).toEqual(new Set([granularity === "key" ? true : "HF_FILE_BUSY"]));
      } finally {
        await site.close();
        await place.drop();
      }
    },
  );
});
