export { conformance, prepare } from "./conformance.ts";
export { execute } from "./ground.ts";
export type { ConformanceCase, ConformanceSite, Ground } from "./ground.ts";
