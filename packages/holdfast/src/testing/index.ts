export { conformance, prepare } from "./conformance.ts";
export type { Anomaly } from "./explore/anomaly.ts";
export { type Exploration, type Scenario, expectNoRace, explore } from "./explore/explore.ts";
export { execute } from "./ground.ts";
export type { ConformanceCase, ConformanceSite, Ground } from "./ground.ts";
