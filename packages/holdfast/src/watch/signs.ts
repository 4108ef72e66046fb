/**
 * What shows that code waits for something else than its database. Where Node publishes it (`node:diagnostics_channel`)
 * that is listened to. Timers, DNS and questions are published nowhere: hooks that would see them (`node:async_hooks`) are
 * paid for with every promise of the process, so the functions themselves are replaced, while anybody is to be told of
 * each. In production, where it is only counted, nothing is.
 */
import { subscribe, unsubscribe } from "node:diagnostics_channel";
import { promisify } from "node:util";
import { type CallSite, callSites } from "../context/call-site.ts";

export type Sign = "fetch" | "http" | "socket" | "dns" | "timer" | "process" | "prompt";

export interface Listener {
  /** Whether it matters here: asked first, and often. */
  matters(): object | undefined;
  /** `about`: what `matters` said. */
  told(about: object, sign: Sign, site: CallSite): void;
  /** Whether the rest of a timer's time still is of interest. */
  lasts(about: object): boolean;
}

type Function = (this: unknown, ...args: unknown[]) => unknown;
type Methods = Record<string, Function>;

const channels: readonly (readonly [channel: string, sign: Sign])[] = [
  ["undici:request:create", "fetch"],
  ["http.client.request.created", "http"],
  ["http2.client.stream.created", "http"],
  ["net.client.socket", "socket"],
  ["child_process", "process"],
  ["worker_threads", "process"],
];

/** Timers that only let others run. */
const leastMs = 2;

/** What Node tells by itself, from now on; returns what ends it. */
export function hearSigns(listener: Listener): () => void {
  const ends = channels.map(([channel, sign]) => {
    const tell = (): void => {
      const about = listener.matters();
      if (about) listener.told(about, sign, callSites.here(tell));
    };
    subscribe(channel, tell);
    return () => void unsubscribe(channel, tell);
  });
  return () => {
    for (const end of ends) end();
  };
}

const lookups = ["lookup", "lookupService", "resolve", "resolve4", "resolve6", "resolveSrv", "resolveTxt"];
/** They are published as well, but for these, which let nobody else run meanwhile. */
const processes = ["spawnSync", "execSync", "execFileSync"];

/** What it does not tell, by functions that are put in the place of its own, from now on; returns what puts them back. */
export function replaceFunctions(listener: Listener): () => void {
  let over = false;
  // Who has taken one of ours aside keeps it.
  const asked: Listener = { ...listener, matters: () => (over ? undefined : listener.matters()) };
  const builtin = (name: string): Methods | undefined =>
    globalThis.process?.getBuiltinModule?.(name) as Methods | undefined;
  const at = (sign: Sign) => (original: Function) =>
    function told(this: unknown, ...args: unknown[]): unknown {
      const about = asked.matters();
      if (about) asked.told(about, sign, callSites.here(told));
      return original.apply(this, args);
    };
  const ends: (() => void)[] = [];
  for (const dns of [builtin("node:dns"), builtin("node:dns/promises")])
    for (const name of lookups) ends.push(replace(dns, name, at("dns")));
  for (const name of processes) ends.push(replace(builtin("node:child_process"), name, at("process")));
  for (const readline of [builtin("node:readline"), builtin("node:readline/promises")]) {
    const { prototype } = (readline?.["Interface"] ?? {}) as { prototype?: Methods };
    ends.push(replace(prototype, "question", at("prompt")));
  }
  // Ours are told apart by their place in files, which a bundle does not have.
  if (callSites.known) ends.push(...timers(asked, builtin("node:timers"), builtin("node:timers/promises")));
  // Those who have imported them by name see it, too.
  const spread = () => {
    try {
      builtin("node:module")?.["syncBuiltinESMExports"]?.();
    } catch {
      // Other runtimes have the name alone.
    }
  };
  spread();
  return () => {
    over = true;
    for (const end of ends) end();
    spread();
  };
}

/** Seen when they fire and are still waited for: those that libraries set in case of silence are cleared before. */
function timers(
  listener: Listener,
  plain: Methods | undefined,
  promised: Methods | undefined,
): (() => void)[] {
  const tell = (about: object, site: CallSite) => {
    if (listener.lasts(about) && site.near) listener.told(about, "timer", site);
  };
  const fires = (original: Function): Function => {
    const set = function (this: unknown, callback: unknown, ms: unknown, ...rest: unknown[]): unknown {
      const about = Number(ms) >= leastMs && typeof callback === "function" ? listener.matters() : undefined;
      if (!about) return original.call(this, callback, ms, ...rest);
      const site = callSites.here(set);
      const fired = function (this: unknown, ...args: unknown[]): unknown {
        tell(about, site);
        return (callback as Function).apply(this, args);
      };
      return original.call(this, fired, ms, ...rest);
    };
    return set;
  };
  const resolves = (original: Function): Function => {
    const wait = function (this: unknown, ...args: unknown[]): unknown {
      const about = Number(args[0]) >= leastMs ? listener.matters() : undefined;
      const waiting = original.apply(this, args);
      if (!about) return waiting;
      const site = callSites.here(wait);
      (waiting as Promise<unknown>).then(
        () => tell(about, site),
        () => {},
      );
      return waiting;
    };
    return wait;
  };
  const custom = promisify.custom;
  const both = (original: Function): Function => {
    const set = fires(original);
    const own = (original as unknown as { [custom]?: Function })[custom];
    if (own) Object.defineProperty(set, custom, { configurable: true, value: resolves(own) });
    return set;
  };
  const scheduler = promised?.["scheduler"] as object | undefined;
  return [
    replace(globalThis as unknown as Methods, "setTimeout", both),
    replace(plain, "setTimeout", both),
    replace(promised, "setTimeout", resolves),
    replace(scheduler && (Object.getPrototypeOf(scheduler) as Methods), "wait", resolves),
  ];
}

/**
 * Puts another in its place, where the runtime has it and lets that be done. Who has done the same after us keeps theirs, which
 * calls ours: it stays, and does nothing.
 */
function replace(
  methods: Methods | undefined,
  name: string,
  by: (original: Function) => Function,
): () => void {
  const original: unknown = methods?.[name];
  if (!methods || typeof original !== "function") return () => {};
  const ours = by(original as Function);
  Object.defineProperty(ours, "name", { configurable: true, value: original.name });
  if (!Reflect.set(methods, name, ours)) return () => {};
  return () => {
    if (methods[name] === ours) Reflect.set(methods, name, original);
  };
}
