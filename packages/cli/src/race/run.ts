/** `holdfast race`: makes the scenarios of a file one after the other, explores each, and tells. */
import { mkdir, writeFile } from "node:fs/promises";
import { dirname, resolve } from "node:path";
import { setTimeout as sleep } from "node:timers/promises";
import { type ExploreOptions, type Scenario, explore } from "holdfast/testing";
import { declined } from "../confirm.ts";
import { Interrupted, exitCodes, jsonErrorOf } from "../failure.ts";
import { unless } from "../unless.ts";
import { findingOf } from "./findings.ts";
import { htmlReport } from "./html.ts";
import { junitReport } from "./junit.ts";
import { type Entry, type RaceScenario, Wanted, checkFile, isScenario, load } from "./load.ts";
import { type Outcome, couldNotRun, ended, exitCodeOf } from "./outcome.ts";
import { checkTest, foundIn, testText } from "./regression.ts";
import { type Place, type Told, openPlace } from "./place.ts";
import { Relay } from "./relay.ts";
import { sarifReport } from "./sarif.ts";
import { schedules } from "./schedules.ts";
import { Screen } from "./screen.ts";

export type Isolation = Extract<ExploreOptions["isolation"], string>;

export interface RaceOptions {
  readonly url?: string;
  readonly schema?: string;
  readonly only?: readonly string[];
  readonly preemptions?: number;
  readonly maxMs?: number;
  readonly minCoverage?: "exhaustive" | number;
  /** As they were typed: `read committed` comes in two pieces. */
  readonly isolation?: readonly string[];
  readonly replay?: string;
  readonly seed?: number;
  readonly bail?: true;
  readonly empty?: true;
  readonly inPlace?: true;
  readonly yes?: true;
  readonly json?: true;
  readonly html?: string;
  readonly svg?: string;
  readonly junit?: string;
  readonly sarif?: string;
  readonly annotations?: boolean;
  readonly writeTest?: string;
  readonly proxy?: number;
}

export interface RunOptions extends Omit<RaceOptions, "isolation"> {
  readonly isolation: readonly Isolation[] | undefined;
}

/** For a scenario to end what it does, and to close what it opened. */
const patienceMs = { interrupted: 2_000, closing: 10_000 };

/** Returns the exit code. */
export async function runRace(file: string, options: RunOptions): Promise<number> {
  const screen = new Screen(file, options.json === true);
  const stop = new AbortController();
  const onSignal = (): void => {
    // Asked twice: whoever waits has lost patience, and a server of ours ends with this process anyway.
    if (stop.signal.aborted) process.exit(exitCodes.stopped);
    stop.abort(new Interrupted());
  };
  // Node would end with 1, which says that there is a race. It stays: pools that nobody closed throw when the server goes.
  process.on("uncaughtException", (error) => stop.abort(error));
  process.on("SIGINT", onSignal);
  process.on("SIGTERM", onSignal);
  // The terminal was closed: what was made goes all the same.
  process.on("SIGHUP", onSignal);
  try {
    const ran = await new Race(file, options, screen, stop).run();
    if (!ran) {
      declined(options.json);
      return exitCodes.no;
    }
    const { outcomes, skipped, database, entries } = ran;
    const reports = {
      ...(options.html !== undefined && { [options.html]: htmlReport(file, outcomes, skipped.length) }),
      ...(options.junit !== undefined && { [options.junit]: junitReport(file, outcomes, skipped) }),
      ...(options.sarif !== undefined && { [options.sarif]: sarifReport(file, outcomes) }),
      ...(options.svg !== undefined && schedules(options.svg, outcomes)),
    };
    for (const [path, text] of Object.entries(reports)) {
      await write(path, text);
      screen.note(`Report: ${path}`);
    }
    if (options.writeTest !== undefined) {
      const made = (key: string) => typeof entries.find((entry) => entry.key === key)?.source === "function";
      const found = foundIn(outcomes, made);
      if (found.length > 0) await write(options.writeTest, testText(found, file, options.writeTest));
      screen.note(
        found.length > 0
          ? `Test: ${options.writeTest} (it fails until ${found.length === 1 ? "the race is" : "the races are"} gone)`
          : "Test: none was written, since no race was found.",
      );
    }
    if (options.annotations ?? process.env["GITHUB_ACTIONS"] === "true")
      screen.annotate(outcomes.flatMap((outcome) => findingOf(file, outcome) ?? []));
    screen.end(outcomes, skipped.length, database);
    return exitCodeOf(outcomes);
  } catch (error) {
    screen.complain(error);
    return jsonErrorOf(error).exitCode;
  } finally {
    await screen.flush();
  }
}

async function write(file: string, text: string): Promise<void> {
  const path = resolve(file);
  await mkdir(dirname(path), { recursive: true });
  await writeFile(path, text);
}

interface Ran {
  readonly outcomes: Outcome[];
  /** The names of those that were not run, since another one failed. */
  readonly skipped: readonly string[];
  readonly database: Told;
  readonly entries: readonly Entry[];
}

class Race {
  readonly #file: string;
  readonly #options: RunOptions;
  readonly #screen: Screen;
  readonly #stop: AbortController;
  readonly #signal: AbortSignal;
  readonly #wanted: Wanted;
  readonly #relay: Relay | undefined;
  /** Of scenarios that share what they close: once, when all are done. */
  readonly #closers = new Map<NonNullable<RaceScenario["close"]>, RaceScenario>();

  constructor(file: string, options: RunOptions, screen: Screen, stop: AbortController) {
    this.#file = file;
    this.#options = options;
    this.#screen = screen;
    this.#stop = stop;
    this.#signal = stop.signal;
    this.#wanted = new Wanted(options.only);
    if (options.proxy !== undefined) this.#relay = new Relay(options.proxy);
  }

  /** Undefined: it was not wanted. */
  async run(): Promise<Ran | undefined> {
    checkFile(this.#file);
    if (this.#options.writeTest !== undefined) checkTest(this.#options.writeTest);
    const { url, empty, inPlace, yes } = this.#options;
    const opening = openPlace({
      file: this.#file,
      url,
      empty,
      inPlace,
      yes,
      say: (note) => this.#screen.note(note),
      stop: (reason) => this.#stop.abort(reason),
    });
    try {
      const place = await unless(this.#signal, opening);
      return place && (await this.#in(place));
    } finally {
      await (await opening.catch(() => undefined))?.[Symbol.asyncDispose]();
    }
  }

  async #in(place: Place): Promise<Ran> {
    this.#screen.guard();
    const all = await unless(this.#signal, load(this.#file));
    const entries = this.#wanted.among(all);
    if (this.#options.replay !== undefined && entries.length > 1 && !this.#options.only)
      throw new Error(`--replay is for one scenario: say with --only which one (${names(all)})`);
    try {
      return { ...(await this.#each(place, entries, all)), database: place.told, entries };
    } finally {
      for (const [, scenario] of this.#closers) await this.#close(scenario).catch(() => {});
      await this.#relay?.close();
    }
  }

  async #each(
    place: Place,
    entries: readonly Entry[],
    all: readonly Entry[],
  ): Promise<Pick<Ran, "outcomes" | "skipped">> {
    const outcomes: Outcome[] = [];
    for (const [i, entry] of entries.entries()) {
      const outcome = await this.#one(place, entry);
      if (!outcome) continue;
      outcomes.push(outcome);
      this.#screen.outcome(outcome);
      if (this.#options.bail && outcome.status !== "ok")
        return { outcomes, skipped: entries.slice(i + 1).map(({ title }) => title) };
    }
    const { missing } = this.#wanted;
    if (missing.length > 0)
      throw new Error(`${this.#file} has no scenario ${missing.join(", ")}; it has ${names(all)}`);
    return { outcomes, skipped: [] };
  }

  /** Undefined: it turned out not to be one that was asked for. */
  async #one(place: Place, entry: Entry): Promise<Outcome | undefined> {
    const { key } = entry;
    let named = { key, name: entry.title };
    let scenario: RaceScenario | undefined;
    let outcome: Outcome | undefined;
    try {
      scenario = await unless(this.#signal, this.#make(place, entry));
      named = { key, name: scenario.name ?? entry.title };
      if (!this.#wanted.has(key, named.name)) return undefined;
      await unless(this.#signal, place.check(scenario));
      outcome = ended(named, await this.#explore(place, named.name, scenario));
    } catch (error) {
      this.#signal.throwIfAborted();
      outcome = couldNotRun(named, error);
    } finally {
      const failure = await this.#finish(entry, scenario);
      if (failure && outcome?.status === "ok") outcome = couldNotRun(named, failure.error);
    }
    return outcome;
  }

  async #make(place: Place, { key, source }: Entry): Promise<RaceScenario> {
    const url = await place.url();
    const proxy = await this.#relay?.to(url);
    const context = { url, ...(proxy && { proxy: proxy.url }) };
    const made: unknown = typeof source === "function" ? await source(context) : source;
    if (!isScenario(made))
      throw new Error(
        `the function ${key} returned no scenario, which is an object with \`actors\` and \`invariant\`; every function that is exported and takes at most one argument is called`,
      );
    if (!made.db) throw new Error("the scenario has no `db`, e.g. fromPg(pool)");
    return proxy ? { ...made, proxy } : made;
  }

  async #explore(place: Place, name: string, scenario: RaceScenario) {
    const onProgress: ExploreOptions["onProgress"] = (progress) => {
      // So that it ends in order, with its connections as they were.
      this.#signal.throwIfAborted();
      place.look();
      this.#screen.progress(name, progress);
      scenario.onProgress?.(progress);
    };
    const exploring = explore(name, {
      maxMs: defaultMs,
      ...scenario,
      ...overrides(this.#options),
      onProgress,
    });
    try {
      return await unless(this.#signal, exploring);
    } catch (error) {
      if (this.#signal.aborted)
        await Promise.race([exploring.catch(() => {}), sleep(patienceMs.interrupted)]);
      throw error;
    }
  }

  /** What a function opened is closed at once, so that the next one finds the database as it was. */
  async #finish({ source }: Entry, scenario?: RaceScenario): Promise<{ error: unknown } | undefined> {
    if (!scenario?.close) return undefined;
    if (typeof source !== "function") {
      this.#closers.set(scenario.close, scenario);
      return undefined;
    }
    try {
      await this.#close(scenario);
      return undefined;
    } catch (error) {
      return { error };
    }
  }

  async #close(scenario: RaceScenario): Promise<void> {
    const ms = this.#signal.aborted ? patienceMs.interrupted : patienceMs.closing;
    const late = sleep(ms, undefined, { ref: false }).then(() => {
      throw new Error(`close does not end for ${ms / 1000} s: is a connection not given back?`);
    });
    await Promise.race([scenario.close?.(), late]);
  }
}

const names = (entries: readonly Entry[]) => entries.map(({ key }) => key).join(", ");

/** No test runner ends it earlier. */
const defaultMs = 10_000;

/** What the command line says goes before what the scenario says. */
function overrides(options: RunOptions): Partial<Scenario> {
  const { preemptions, maxMs, minCoverage, isolation, replay, seed } = options;
  return Object.fromEntries(
    Object.entries({ preemptions, maxMs, minCoverage, isolation, replay, seed }).filter(
      ([, value]) => value !== undefined,
    ),
  );
}
