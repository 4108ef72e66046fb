/** Jest as it comes, with its own 5 s for a test, and against what was built: it knows no other conditions of exports. */
export default { rootDir: import.meta.dirname, testMatch: ["**/*.jest.js"], transform: {} };
