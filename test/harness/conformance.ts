/** What every client must do, on every engine: one file per kind of server, so that they run side by side. */
import { conformance, prepare, type ConformanceSite, type Ground } from "holdfast/testing";
import { afterAll, beforeAll, describe, expect, inject, test } from "vitest";
import { type Backend, type Server, backends as all } from "../backends.ts";
import { missing, placeFor, type Place } from "./places.ts";

const cases = conformance();
/** With HOLDFAST_BACKENDS: only these, by their names (`npm run test:quick`). */
const chosen = process.env["HOLDFAST_BACKENDS"]?.split(",");

/** Clients that work inside this process keep it from everything else while they do. */
const isServer = ({ server }: Backend): boolean => server !== "file" && server !== "process";

/**
 * The driver below an ORM runs every case on the same server, so an ORM runs a sample: half of the cases, or a quarter where its engine
 * has another server that samples half. The seed chooses, so that runs differ. One case of each suite always runs. With HOLDFAST_LONG all do.
 */
function sampledEvery({ orm, server }: Backend): number {
  if (!orm || process.env["HOLDFAST_LONG"] === "1") return 1;
  return server === "pgbouncer" || server === "mysql" ? 4 : 2;
}

function casesOf(backend: Backend): typeof cases {
  const every = sampledEvery(backend);
  const place = inject("seed") + all.indexOf(backend);
  const first = new Map(cases.toReversed().map((each) => [each.suite, each]));
  return cases.filter((each, i) => first.get(each.suite) === each || (place + i) % every === 0);
}

export function conformanceOn(...servers: readonly Server[]): void {
  const backends = all.filter(
    ({ name, server }) => servers.includes(server) && (!chosen || chosen.includes(name)),
  );
  /** Cells of suites × backends in which something was really run. */
  const cells = new Set<string>();

  // Most of a case's time is waiting: servers go side by side, each one's cases one after the other.
  describe.concurrent.each(backends.filter(isServer))("$name", (backend) => {
    suites(backend, cells);
  });
  describe.each(backends.filter((backend) => !isServer(backend)))("$name", (backend) => {
    suites(backend, cells);
  });

  test("no cell of suites × backends is empty", ({ skip }) => {
    const lacking = backends.filter((backend) => missing(backend) !== undefined);
    skip(lacking.length > 0, lacking.map(missing).join("; "));
    const wanted = backends.flatMap(({ name }) =>
      [...new Set(cases.map(({ suite }) => suite))].map((suite) => `${suite} on ${name}`),
    );
    expect([...cells].toSorted()).toEqual(wanted.toSorted());
  });
}

function suites(backend: Backend, cells: Set<string>): void {
  const why = missing(backend);
  let place: Place;
  let sites: ConformanceSite[] = [];
  let ground: (name: string) => Promise<Ground>;

  beforeAll(async () => {
    if (why !== undefined) return;
    place = await placeFor(backend);
    sites = [await backend.open(place.url), await backend.open(place.url)];
    ground = await prepare(sites[0] as ConformanceSite, sites[1] as ConformanceSite);
  });

  afterAll(async () => {
    for (const site of sites) await site.close();
    await place?.drop();
  });

  for (const { suite, name, run } of casesOf(backend)) {
    test(`${suite}: ${name}`, { concurrent: false }, async ({ skip }) => {
      skip(why !== undefined, why);
      await run(await ground(suite));
      cells.add(`${suite} on ${backend.name}`);
    });
  }
}
