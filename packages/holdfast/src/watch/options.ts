/** What an instance is to be watched for. */
import { UsageError } from "../seam/errors.ts";
import { checkNames } from "../input/options.ts";
import { milliseconds } from "../waiting/wait.ts";

export type HazardMode = "warn" | "throw" | "count" | "off";

const modes: readonly HazardMode[] = ["warn", "throw", "count", "off"];

export interface SlowOptions {
  /** Milliseconds that a transaction may hold locks before it is suspect. Default 100. */
  readonly suspect?: number;
  /** The same, before it is broken. Default 1,000. */
  readonly broken?: number;
}

export interface Watching {
  readonly hazards: HazardMode;
  readonly slow: { readonly suspectMs: number; readonly brokenMs: number } | undefined;
  readonly orderFile: string | undefined;
}

export function watching(options: {
  readonly hazards?: HazardMode;
  readonly slow?: SlowOptions | false;
  readonly orderFile?: string;
}): Watching {
  const env = globalThis.process?.env ?? {};
  const { hazards = env["NODE_ENV"] === "production" ? "count" : "warn", slow = {} } = options;
  const { orderFile = env["HOLDFAST_ORDER"] } = options;
  if (!modes.includes(hazards))
    throw new UsageError(`hazards must be one of ${modes.map((each) => `"${each}"`).join(", ")}`);
  if (orderFile !== undefined && typeof orderFile !== "string")
    throw new UsageError("orderFile must be the name of a file");
  return { hazards, slow: slow === false ? undefined : thresholds(slow), orderFile: orderFile || undefined };
}

function thresholds(slow: SlowOptions): NonNullable<Watching["slow"]> {
  if (typeof slow !== "object" || slow === null) throw new UsageError("slow must be false, or an object");
  checkNames("slow", slow, new Set(["suspect", "broken"]));
  const { suspect = Math.min(100, slow.broken ?? 100), broken = Math.max(1000, slow.suspect ?? 0) } = slow;
  const found = {
    suspectMs: milliseconds(suspect, "slow.suspect", 0),
    brokenMs: milliseconds(broken, "slow.broken", 0),
  };
  if (found.brokenMs < found.suspectMs)
    throw new UsageError("slow.broken must not be less than slow.suspect");
  return found;
}
