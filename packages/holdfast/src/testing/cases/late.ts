import { setTimeout as sleep, setImmediate as turn } from "node:timers/promises";
import { type Ground, execute } from "../ground.ts";
import { assert, sql, suite, table } from "./support.ts";

type Ending = (ground: Ground, body: (native: unknown) => Promise<void>) => Promise<unknown>;

/**
 * A body that goes on after its call has ended, through the client that it was given: what it sends then must be
 * refused, and not be kept, neither by itself nor as a part of somebody else's transaction.
 */
async function goesOn(ground: Ground, end: Ending, rounds: number): Promise<void> {
  const { hf, site } = ground;
  const name = await table(ground);
  const write = (k: string) => `INSERT INTO ${name} (k, n) VALUES ('${k}', 1)`;
  let over = false;
  let kept = 0;
  const working: Promise<void>[] = [];
  try {
    for (let round = 0; round < rounds; round++) {
      const body = async (native: unknown) => {
        await site.send(native, write("inside"));
        working.push(
          (async () => {
            // Refused again and again, it has made its point.
            for (let refused = 0; !over && refused < 10;) {
              try {
                await site.send(native, write("late"));
                await turn();
              } catch {
                refused++;
                await sleep(5);
              }
            }
          })(),
        );
      };
      await assert.rejects(end(ground, body));
      // Others get the same connections.
      for (let i = 0; i < 5; i++) {
        await hf.transaction(async (tx) => {
          await site.send(tx.client, write("other"));
          await turn();
        });
        kept++;
      }
    }
  } finally {
    over = true;
    await Promise.all(working);
  }
  const rows = await execute(site, sql`SELECT k, count(*) AS n FROM ${sql.id(name)} GROUP BY k`);
  const counts = rows.map(({ k, n }) => [String(k), Number(n)] as const);
  assert.deepEqual(Object.fromEntries(counts), { other: kept });
}

const never = () => new Promise<never>(() => {});

export const lateCases = suite("late", {
  "writes nothing through its client after the body has thrown": (ground) =>
    goesOn(
      ground,
      ({ hf }, body) =>
        hf.transaction(async (tx) => {
          await body(tx.client);
          await turn();
          throw new Error("no");
        }),
      8,
    ),

  "writes nothing through its client after the deadline": (ground) =>
    goesOn(
      ground,
      ({ hf }, body) => hf.transaction({ deadline: 100, retry: false }, (tx) => body(tx.client).then(never)),
      1,
    ),

  "writes nothing through its client after an abort": (ground) =>
    goesOn(
      ground,
      ({ hf }, body) => {
        const aborting = new AbortController();
        return hf.transaction({ signal: aborting.signal }, async (tx) => {
          await body(tx.client);
          setTimeout(() => aborting.abort(new Error("no longer wanted")), 20);
          return never();
        });
      },
      1,
    ),

  "writes nothing through its client after the call has succeeded": async (ground) => {
    const { hf, site } = ground;
    const name = await table(ground);
    const write = (k: string) => `INSERT INTO ${name} (k, n) VALUES ('${k}', 1)`;
    for (let round = 0; round < 8; round++) {
      const escaped = await hf.transaction(async (tx) => {
        await site.send(tx.client, write("inside"));
        return tx.client;
      });
      const late = Promise.resolve().then(() => site.send(escaped, write("late")));
      await assert.rejects(late);
      await hf.transaction(async (tx) => {
        const during = Promise.resolve().then(() => site.send(escaped, write("late")));
        await assert.rejects(during);
        await site.send(tx.client, write("other"));
      });
    }
    const rows = await execute(site, sql`SELECT k, count(*) AS n FROM ${sql.id(name)} GROUP BY k ORDER BY k`);
    assert.deepEqual(
      rows.map(({ k, n }) => [k, Number(n)]),
      [
        ["inside", 8],
        ["other", 8],
      ],
    );
  },
});
