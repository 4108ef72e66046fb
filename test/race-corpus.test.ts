/** Published races, some more, and flows that have none: what `explore` must find, and what it must not. */
import { type Scenario, explore } from "holdfast/testing";
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { expectCalm } from "./harness/calm.ts";
import { unavailable } from "./harness/databases.ts";
import { type Clients, bundle } from "./races/clients.ts";
import { exact, races } from "./races/index.ts";
import type { Engine, Exact, Race, Version } from "./races/race.ts";

/** For what has no race. How far it gets in the time depends on the machine; with HOLDFAST_LONG further. */
const calmMs = process.env["HOLDFAST_LONG"] === "1" ? 10_000 : 1000;

type Flow = Race | Exact;
type Actors = ReturnType<Version["actors"]>;

const all: readonly Flow[] = [...races, ...exact];

const versions = (flow: Flow): Version[] => ("correct" in flow ? [flow.correct] : [flow.naive, flow.fixed]);

/** Makes the tables anew, as the one version may need a constraint that the other one must not have. */
async function build(clients: Clients, flow: Flow, version: Version): Promise<void> {
  for (const name of Object.keys(flow.tables).toReversed()) {
    await clients.query(`DROP TABLE IF EXISTS ${name}`);
  }
  for (const [name, columns] of Object.entries(flow.tables)) {
    await clients.query(`CREATE TABLE ${name} (${columns})`);
  }
  for (const statement of version.migration ?? []) await clients.query(statement);
  await flow.prepare?.(clients);
}

async function reset(clients: Clients, flow: Flow): Promise<void> {
  for (const name of [...Object.keys(flow.tables).toReversed(), ...(flow.emptied ?? [])]) {
    await clients.query(`DELETE FROM ${name}`);
  }
  for (const statement of flow.rows) await clients.query(statement);
}

function* orders<T>(items: readonly T[]): Generator<T[]> {
  if (items.length === 0) yield [];
  for (const item of items) {
    for (const rest of orders(items.filter((other) => other !== item))) yield [item, ...rest];
  }
}

/** One after the other, in every order, the rule holds: what breaks it is a race, and not a plain mistake. */
async function expectSerial(clients: Clients, flow: Flow, actors: Actors): Promise<void> {
  for (const order of orders(Object.entries(actors))) {
    await reset(clients, flow);
    const results: Record<string, PromiseSettledResult<unknown>> = {};
    for (const [name, act] of order) {
      const [result] = await Promise.allSettled([act()]);
      results[name] = result;
    }
    const names = order.map(([name]) => name).join(", then ");
    await expect(flow.invariant(clients, results), names).resolves.toBeUndefined();
  }
}

function scenarioOf(clients: Clients, flow: Flow, version: Version): Scenario {
  return {
    db: clients.db,
    reset: () => reset(clients, flow),
    actors: version.actors(clients),
    invariant: (results) => flow.invariant(clients, results),
  };
}

async function report(clients: Clients, flow: Flow, version: Version, maxMs: number) {
  await build(clients, flow, version);
  return explore(flow.title, { ...scenarioOf(clients, flow, version), maxMs, minCoverage: 0 });
}

async function expectNone(clients: Clients, flow: Flow, version: Version): Promise<void> {
  await build(clients, flow, version);
  await expectCalm(calmMs, flow.title, scenarioOf(clients, flow, version));
}

const name = (flow: Flow): string => `${flow.title} (${flow.client})`;

function suite(engine: Engine, body: (clients: () => Clients, flows: readonly Flow[]) => void): void {
  const why = unavailable(engine);
  describe(`on ${engine}`, () => {
    const flows = all.filter(({ engines }) => engines.includes(engine));
    let clients: Clients;
    beforeAll(async () => {
      if (why === undefined) clients = await bundle(engine, flows);
    });
    beforeEach((context) => context.skip(why !== undefined, why));
    afterAll(() => clients?.close());
    body(() => clients, flows);
  });
}

function oneAfterTheOther(clients: () => Clients, flows: readonly Flow[]): void {
  test.each(flows.map((flow) => [name(flow), flow] as const))("one after the other: %s", async (_, flow) => {
    for (const version of versions(flow)) {
      await build(clients(), flow, version);
      await expectSerial(clients(), flow, version.actors(clients()));
    }
  });
}

function explored(engine: Engine) {
  return (clients: () => Clients, flows: readonly Flow[]): void => {
    oneAfterTheOther(clients, flows);
    const pairs = races.filter(({ engines }) => engines.includes(engine));
    const others = exact.filter(({ engines }) => engines.includes(engine));

    test.each(pairs.map((race) => [name(race), race] as const))("found: %s", async (_, race) => {
      const { ok, anomaly, text } = await report(clients(), race, race.naive, 30_000);
      expect(ok, text).toBe(false);
      // One after the other the rule holds: see above.
      expect(anomaly, text).not.toBe("not a race");
      if (race.expects && engine === "postgres") expect(anomaly, text).toBe(race.expects);
    });

    test.each(pairs.map((race) => [name(race), race] as const))("none after the fix: %s", async (_, race) => {
      await expectNone(clients(), race, race.fixed);
    });

    test.each(others.map((flow) => [name(flow), flow] as const))("none: %s", async (_, flow) => {
      await expectNone(clients(), flow, flow.correct);
    });
  };
}

suite("postgres", explored("postgres"));
suite("mariadb", explored("mariadb"));
