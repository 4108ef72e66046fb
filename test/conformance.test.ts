import { conformance, prepare, type ConformanceSite, type Ground } from "holdfast/testing";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { type Backend, backends as all } from "./backends.ts";
import { missing, placeFor, type Place } from "./harness/places.ts";

const cases = conformance();
/** With HOLDFAST_BACKENDS: only these, by their names (`npm run test:quick`). */
const chosen = process.env["HOLDFAST_BACKENDS"]?.split(",");
const backends = all.filter(({ name }) => !chosen || chosen.includes(name));
/** Cells of suites × backends in which something was really run. */
const cells = new Set<string>();

/** Clients that work inside this process keep it from everything else while they do. */
const isServer = ({ server }: Backend): boolean => server !== "file" && server !== "process";

// Most of a case's time is waiting: servers go side by side, each one's cases one after the other.
describe.concurrent.each(backends.filter(isServer))("$name", (backend) => {
  suites(backend);
});
describe.each(backends.filter((backend) => !isServer(backend)))("$name", (backend) => {
  suites(backend);
});

function suites(backend: Backend): void {
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

  for (const { suite, name, run } of cases) {
    test(`${suite}: ${name}`, { concurrent: false }, async ({ skip }) => {
      skip(why !== undefined, why);
      await run(await ground(suite));
      cells.add(`${suite} on ${backend.name}`);
    });
  }
}

test("no cell of suites × backends is empty", ({ skip }) => {
  const lacking = backends.filter((backend) => missing(backend) !== undefined);
  skip(lacking.length > 0, lacking.map(missing).join("; "));
  const wanted = backends.flatMap(({ name }) =>
    [...new Set(cases.map(({ suite }) => suite))].map((suite) => `${suite} on ${name}`),
  );
  expect([...cells].toSorted()).toEqual(wanted.toSorted());
});
