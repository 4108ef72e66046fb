/**
 * What every engine and every client must do, on a real server. Each case runs where the capabilities say that it
 * can, and asserts the refusal where they say that it cannot: a promise is kept or refused, never forgotten.
 *
 *     const ground = await prepare(await open(), await open());
 *     for (const { suite, name, run } of conformance()) {
 *       test(`${suite}: ${name}`, async () => run(await ground(suite)));
 *     }
 */
import { type HoldfastOptions, holdfast } from "../holdfast.ts";
import { abortCases } from "./cases/abort.ts";
import { auditCases } from "./cases/audit.ts";
import { inspectCases } from "./cases/inspect.ts";
import { joinCases } from "./cases/join.ts";
import { lateCases } from "./cases/late.ts";
import { leaseCases } from "./cases/lease.ts";
import { lockCases } from "./cases/lock.ts";
import { onceCases } from "./cases/once.ts";
import { queueCases } from "./cases/queue.ts";
import { quotaCases } from "./cases/quota.ts";
import { retryCases } from "./cases/retry.ts";
import { rowCases, tableCases } from "./cases/rows.ts";
import { scheduleCases } from "./cases/schedule.ts";
import { sessionCases } from "./cases/session.ts";
import { stockCases } from "./cases/stock.ts";
import { transactionCases } from "./cases/transaction.ts";
import { versionCases } from "./cases/version.ts";
import type { ConformanceCase, ConformanceSite, Ground } from "./ground.ts";

/** Cases that are about waits say how long; the others are not about how fast the machine is. */
const wait = 30_000;

/** The two sites of one backend, ready for cases. */
export async function prepare(
  one: ConformanceSite,
  two: ConformanceSite,
  given: Pick<HoldfastOptions, "schema" | "isolation"> = {},
): Promise<(name: string) => Promise<Ground>> {
  const options = { wait, ...given };
  const [hf, other] = [holdfast(one.database, options), holdfast(two.database, options)];
  await Promise.all([hf.migrate(), other.migrate()]);
  const capabilities = await hf.capabilities();
  let count = 0;
  return async (name) => ({
    hf,
    other,
    another: (database = one.database) => holdfast(database, options),
    site: one,
    capabilities,
    fresh: `${name}-${++count}-${process.pid}`,
  });
}

export function conformance(): ConformanceCase[] {
  return [
    ...transactionCases,
    ...lateCases,
    ...retryCases,
    ...lockCases,
    ...joinCases,
    ...abortCases,
    ...sessionCases,
    ...rowCases,
    ...tableCases,
    ...versionCases,
    ...inspectCases,
    ...onceCases,
    ...leaseCases,
    ...stockCases,
    ...scheduleCases,
    ...auditCases,
    ...queueCases,
    ...quotaCases,
  ];
}
