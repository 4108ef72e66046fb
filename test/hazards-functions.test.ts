/** Whose functions are whose: in production, where hazards are only counted, none of Node's is replaced. */
import childProcess, * as childProcessNames from "node:child_process";
import { subscribe, unsubscribe } from "node:diagnostics_channel";
import dns, * as dnsNames from "node:dns";
import dnsPromises from "node:dns/promises";
import http from "node:http";
import net from "node:net";
import readline from "node:readline";
import readlinePromises from "node:readline/promises";
import { DatabaseSync } from "node:sqlite";
import timers, * as timersNames from "node:timers";
import timersPromises, * as timersPromisesNames from "node:timers/promises";
import { promisify } from "node:util";
import { type HoldfastOptions, holdfast, key } from "holdfast";
import { fromNodeSqlite } from "holdfast/node-sqlite";
import { afterEach, expect, test } from "vitest";

/** All that code can reach by a name, by what it is a property of. */
const owners: Readonly<Record<string, object>> = {
  globalThis,
  "node:timers": timers,
  "node:timers/promises": timersPromises,
  "scheduler of node:timers/promises": Object.getPrototypeOf(timersPromises.scheduler) as object,
  "node:dns": dns,
  "node:dns/promises": dnsPromises,
  "node:child_process": childProcess,
  "node:readline": readline,
  "Interface of node:readline": readline.Interface.prototype,
  "Interface of node:readline/promises": readlinePromises.Interface.prototype,
  "node:http": http,
  "node:net": net,
  "Socket of node:net": net.Socket.prototype,
  Promise,
  "Promise.prototype": Promise.prototype,
};

/** By name, as it is at this moment; getters are not called. */
function everything(): Map<string, unknown> {
  const found = new Map<string, unknown>();
  for (const [owner, object] of Object.entries(owners))
    for (const name of Reflect.ownKeys(object)) {
      const { value, get } = Object.getOwnPropertyDescriptor(object, name) as PropertyDescriptor;
      if (typeof (value ?? get) === "function") found.set(`${owner}: ${String(name)}`, value ?? get);
    }
  // What was imported by name, and what is behind `promisify`.
  const names: [string, object][] = [
    ["child_process", childProcessNames],
    ["dns", dnsNames],
    ["timers", timersNames],
    ["timers/promises", timersPromisesNames],
  ];
  for (const [module, exported] of names)
    for (const [name, value] of Object.entries(exported))
      found.set(`import { ${name} } from ${module}`, value);
  found.set("promisify(setTimeout)", (setTimeout as { [promisify.custom]?: unknown })[promisify.custom]);
  return found;
}

const originals = everything();

/** Names of what is another function now. */
function replaced(): string[] {
  return [...everything()].filter(([name, value]) => originals.get(name) !== value).map(([name]) => name);
}

const opened: { close(): Promise<void> }[] = [];

function open(options: HoldfastOptions) {
  const hf = holdfast(fromNodeSqlite(new DatabaseSync(":memory:")), options);
  opened.push(hf);
  return hf;
}

afterEach(async () => {
  for (const hf of opened.splice(0)) await hf.close();
});

test.each(["count", "off"] as const)('"%s": nothing of Node is replaced', async (hazards) => {
  const hf = open({ hazards });
  let inside: string[] | undefined;
  await hf.transaction({ lock: key("a", 1) }, async () => void (inside = replaced()));
  expect(inside).toEqual([]);
  expect(replaced()).toEqual([]);
});

test("in production nothing is, unless it is asked for", async () => {
  const { NODE_ENV } = process.env;
  process.env["NODE_ENV"] = "production";
  try {
    open({});
    expect(replaced()).toEqual([]);
  } finally {
    process.env["NODE_ENV"] = NODE_ENV;
  }
  open({});
  expect(replaced()).not.toEqual([]);
});

test.each(["warn", "throw"] as const)('"%s": put back when the last one is closed', async (hazards) => {
  const [one, two, counting] = [open({ hazards }), open({ hazards }), open({ hazards: "count" })];
  const during = replaced();
  for (const name of [
    "globalThis: setTimeout",
    "import { setTimeout } from timers/promises",
    "import { lookup } from dns",
    "node:child_process: spawnSync",
    "Interface of node:readline: question",
    "promisify(setTimeout)",
  ])
    expect(during).toContain(name);
  await one.close();
  await one.close();
  expect(replaced()).toEqual(during);
  await two.close();
  expect(replaced()).toEqual([]);
  await counting.close();
  expect(replaced()).toEqual([]);
});

test("who has put a function over ours keeps it: ours below does nothing any more, and nothing is told twice", async () => {
  const first = open({ hazards: "throw" });
  const ours = globalThis.setTimeout;
  const theirs = Object.assign((...args: Parameters<typeof setTimeout>) => ours(...args), {
    __promisify__: setTimeout.__promisify__,
  });
  globalThis.setTimeout = theirs;
  try {
    await first.close();
    expect(globalThis.setTimeout).toBe(theirs);
    const second = open({ hazards: "throw" });
    const told: unknown[] = [];
    const listen = (event: unknown) => void told.push(event);
    subscribe("holdfast:hazard", listen);
    const failing = second.transaction({ lock: key("b", 1) }, async () => {
      await new Promise((resolve) => setTimeout(resolve, 5));
    });
    await expect(failing).rejects.toMatchObject({ code: "HF_HAZARD", kind: "timer" });
    unsubscribe("holdfast:hazard", listen);
    expect(told).toHaveLength(1);
    await second.close();
    expect(globalThis.setTimeout).toBe(theirs);
  } finally {
    globalThis.setTimeout = originals.get("globalThis: setTimeout") as typeof setTimeout;
  }
  expect(replaced()).toEqual([]);
});
