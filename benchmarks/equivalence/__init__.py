"""Features of Keras that must compute the same on several devices as on one.

    from benchmarks.equivalence import features, trial

    feature = features.FEATURES["clipnorm"]
    reference = trial.run(feature, keras.Model)                   # one device, no strategy
    outcome = trial.run(feature, kdist.Model, strategy)           # the same global batches
    print(feature.judge(outcome, reference))                      # works | wrong by 0.05

`feature` defines a row, `trial` trains it, and `features` lists all rows. The modules named after a
theme contain the definitions. `cells`, `table`, and `compare` are the program `kdist compare`.
"""
