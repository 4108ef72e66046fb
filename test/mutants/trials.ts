/**
 * What the library promises, tried on a real server: by the explorer, by histories, and with faults. Each of them must
 * succeed with the library as it is, and fail without a protection that it names.
 */
import type { Ground } from "./ground.ts";
import { lockTrials } from "./locks.ts";
import { patternTrials } from "./patterns.ts";

export interface Trial {
  readonly name: string;
  readonly by: "explorer" | "history" | "chaos";
  /** The protections (see `seam/protections.ts`) without which it fails. */
  readonly kills: readonly string[];
  /** Throws `Broken` if a promise is. */
  run(ground: Ground): Promise<void>;
}

export const trials: readonly Trial[] = [...lockTrials, ...patternTrials];
